"""Describes a batch in one line: the keys, types, shapes and value ranges of its tensors, and its other objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

MAX_TENSORS = 16
"""Tensors to describe; the others are only counted."""


def describe_batch(batch: Any, with_ranges: bool = False) -> str:
    """Return the keys, types and shapes of a batch's tensors, and with `with_ranges` the ranges of integers."""
    named = _with_keys(batch)
    parts = [f"{name}{_describe(value, with_ranges)}" for name, value in islice(named, MAX_TENSORS)]
    if remaining := sum(1 for _ in named):
        parts.append(f"{remaining} more")
    return ", ".join(parts) or "no tensors"


def _describe(part: Any, with_range: bool) -> str:
    if isinstance(part, tuple | list):
        return f"{type(part).__name__} of {len(part)} {type(part[0]).__name__}"
    if not isinstance(part, Tensor):
        return f"{type(part).__name__} of {len(part)}" if hasattr(part, "__len__") else type(part).__name__
    return f"{str(part.dtype).removeprefix('torch.')} {_shape(part)}{_range(part) if with_range else ''}"


def _with_keys(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, lists and objects of a batch in order, each with its keys, such as 'inputs.image '."""
    is_object = hasattr(batch, "to") and not isinstance(batch, Mapping | tuple | list)
    if is_object or isinstance(batch, Tensor):
        yield name and f"{name} ", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _with_keys(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list) and batch and all(isinstance(item, str | int | float) for item in batch):
        yield name and f"{name} ", batch
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _with_keys(value, name)


def _shape(tensor: Tensor) -> str:
    return f"({tensor.size(0)}, ...)" if tensor.is_nested else f"{tuple(tensor.shape)}"


def _range(tensor: Tensor) -> str:
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        return ""
    try:
        least, greatest = (bound.item() for bound in tensor.aminmax())
    except RuntimeError:  # on the meta device, or after an error of a GPU
        return ""
    return f" from {least} to {greatest}"
