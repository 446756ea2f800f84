"""Shared code of the algorithms that replace a GPT's learned positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from runner.models import GPT

Made = TypeVar("Made")


class Kept(Generic[Made]):
    """A value that depends only on the shape of queries, kept for the last shape: layers and most batches share it.

    Args:
        make: computes the value for queries (N, H, T, D / H).
    """

    def __init__(self, make: Callable[[Tensor], Made]) -> None:
        self.make = make
        self._made_for: Any = None
        self._made: Made | None = None

    def of(self, x: Tensor) -> Made:
        """Return it for queries or keys (N, H, T, D / H)."""
        if torch.compiler.is_compiling():  # it becomes part of the graph, which knows what is computed twice
            return self.make(x)
        needed = (x.shape[1:], x.dtype, x.device)
        if self._made is None or needed != self._made_for:
            with torch.inference_mode(False):  # training may use it after an inference has made it
                self._made = self.make(x)
            self._made_for = needed
        return self._made


def drop_positions(module: nn.Module, index: int) -> None:
    """Remove a GPT's learned positions in place; a policy for `replace_modules` that keeps the module itself."""
    assert isinstance(module, GPT)
    module.position_embedding = None
