"""Copies of tensors in CPU memory that is reused: filling new memory takes three times as long."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from runner.device.staging import staging


class Copies:
    """Copies tensors to the CPU, all at once, into the memory of earlier copies of the same shapes.

    That memory stays allocated between saves.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._free: deque[Tensor] = deque()
        self._pending: list[tuple[Tensor, Tensor]] = []

    def reuse(self) -> None:
        """Let the next copies overwrite all that were made so far, in the same order."""
        self._free = deque(self._made)
        self._made = []
        self._pending = []  # of a capture that failed

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor that will hold the values of another after `finish`, or that of `Staging` from a GPU."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
            return tensor.clone() if tensor.is_cpu else tensor.cpu()
        made = self._free.popleft() if self._free else None
        if made is None or made.shape != tensor.shape or made.dtype != tensor.dtype or made.stride() != tensor.stride():
            made = torch.empty_like(tensor, device="cpu")
        self._made.append(made)
        if tensor.is_cuda:
            return staging(tensor.device).copy(tensor, made)
        self._pending.append((made, tensor))
        return made

    def finish(self) -> None:
        """Copy the values that pending tensors have now."""
        if self._pending:
            # At once: after each large copy, Python would find none of its own memory in the processor's caches.
            targets, sources = (list(one) for one in zip(*self._pending, strict=True))
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
            self._pending.clear()


def to_host(tensor: Tensor, copies: Copies | None) -> Tensor:
    """Return a tensor on the CPU: a copy, or, without `copies`, the tensor itself if it is there already."""
    if copies is not None:
        return copies.copy(tensor)
    on_gpu = tensor.is_cuda and tensor.layout is torch.strided
    return staging(tensor.device).copy(tensor) if on_gpu else tensor.cpu()
