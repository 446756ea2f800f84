"""Shared code of the algorithms that replace a GPT's learned positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from runner.models import GPT

Value = TypeVar("Value")


class ShapeCache(Generic[Value]):
    """A cached value that depends only on the shape of queries, the same for all layers and most batches.

    Args:
        make: computes the value for queries (N, H, T, D / H).
    """

    def __init__(self, make: Callable[[Tensor], Value]) -> None:
        self.make = make
        self._key: Any = None
        self._value: Value | None = None

    def get(self, x: Tensor) -> Value:
        """Return the value for queries or keys (N, H, T, D / H)."""
        if torch.compiler.is_compiling():  # the graph itself computes the value only once
            return self.make(x)
        key = (x.shape[1:], x.dtype, x.device)
        if self._value is None or key != self._key:
            with torch.inference_mode(False):  # training may use a value that was computed in inference
                self._value = self.make(x)
            self._key = key
        return self._value


def drop_positions(module: nn.Module, index: int) -> None:
    """Remove a GPT's learned positions in place. Returns None, so that `replace_modules` keeps the module."""
    assert isinstance(module, GPT)
    module.position_embedding = None
