"""Typed versions of what torch and Python leave untyped, for the rooms that pyright checks strictly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
from torch import Tensor


def to_list(vector: Tensor) -> list[float]:
    """Return the elements of a vector, with one sync."""
    return vector.tolist()


def restored_torch_generators(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Restore torch's generators on the CPU and on CUDA devices after the body of a `with` statement."""
    return torch.random.fork_rng(devices)


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)
