"""Copy tensors into reused CPU memory, because filling new memory takes three times as long."""

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
        self._used: list[Tensor] = []
        self._free: deque[Tensor] = deque()
        self._pending: list[tuple[Tensor, Tensor]] = []

    def reuse(self) -> None:
        """Let the next copies overwrite all earlier ones, in the same order."""
        self._free = deque(self._used)
        self._used = []
        self._pending = []  # left by a capture that failed

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor that `finish` fills with the values, or `Staging.finish` for a tensor on a GPU."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
            return tensor.clone() if tensor.is_cpu else tensor.cpu()
        out = self._free.popleft() if self._free else None
        if out is None or out.shape != tensor.shape or out.dtype != tensor.dtype or out.stride() != tensor.stride():
            out = torch.empty_like(tensor, device="cpu")
        self._used.append(out)
        if tensor.is_cuda:
            return staging(tensor.device).copy(tensor, out)
        self._pending.append((out, tensor))
        return out

    def finish(self) -> None:
        """Copy the current values of all pending tensors."""
        if self._pending:
            # All in one call, because each large copy evicts Python's own memory from the CPU caches.
            targets, sources = map(list, zip(*self._pending, strict=True))
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
            self._pending.clear()


def to_host(tensor: Tensor, copies: Copies | None) -> Tensor:
    """Return a tensor on the CPU: a copy, or, without `copies`, the tensor itself if it is already there."""
    if copies is not None:
        return copies.copy(tensor)
    on_gpu = tensor.is_cuda and tensor.layout is torch.strided
    return staging(tensor.device).copy(tensor) if on_gpu else tensor.cpu()
