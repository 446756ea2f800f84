"""Copy tensors from a GPU to ordinary host memory, through one pinned buffer that is reused."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

STAGING_BYTES = 1 << 26
"""Size of the buffer in bytes: host memory that stays locked after the first copy."""


class Staging:
    """Copies tensors through the two halves of a pinned buffer: the GPU fills one while the host empties the other.

    A direct copy to ordinary memory would wait for the GPU each time and run at a fraction of the speed. A pinned copy
    of everything would lock as much memory as a model and its optimizer take. `size` is the size of the buffer in
    bytes; `backend` makes events, like `torch.cuda`.
    """

    def __init__(self, device: torch.device, size: int = STAGING_BYTES, backend: Any = torch.cuda) -> None:
        self._device = device
        self._backend = backend
        self._filling, self._emptying = (_Half(size // 2, backend.Event()) for _ in range(2))

    def copy(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """Return a tensor on the host that `finish` fills with the current values of a tensor on the GPU.

        It is `into`, which has the same shape, type and strides, or a new tensor.
        """
        copied = torch.empty_like(tensor, device="cpu") if into is None else into
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)  # of the dimensions in memory
        packed = tensor.permute(order)
        if copied.stride() != tensor.stride() or not packed.is_contiguous():
            return tensor.cpu()
        source = packed.view(-1).view(torch.uint8)
        target = copied.permute(order).view(-1).view(torch.uint8)
        while len(source):
            count = self._filling.add(source, target)
            source = source[count:]
            target = target[count:]
            if len(source):  # the half is full
                self._swap_halves()
        return copied

    def finish(self) -> None:
        """Wait for pending copies, and fill the tensors returned by `copy`. An intended host-device sync."""
        self._swap_halves()
        self._swap_halves()

    def _swap_halves(self) -> None:
        self._filling.event.record(self._backend.current_stream(self._device))
        self._filling, self._emptying = self._emptying, self._filling
        self._filling.empty()


class _Half:
    """Half of the buffer, with the parts of tensors that it holds."""

    def __init__(self, size: int, event: Any) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.event = event
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.used = 0

    def add(self, source: Tensor, target: Tensor) -> int:
        """Queue a copy of the bytes that fit into the half, and return their number."""
        count = min(len(source), len(self.buffer) - self.used)
        part = self.buffer[self.used : self.used + count]
        part.copy_(source[:count], non_blocking=True)
        self.parts.append((target[:count], part))
        self.used += count
        return count

    def empty(self) -> None:
        """Wait for the copies from the GPU, and copy them to their targets."""
        if self.parts:
            self.event.synchronize()
        for target, part in self.parts:
            target.copy_(part)
        self.parts.clear()
        self.used = 0


@functools.cache
def staging(device: torch.device) -> Staging:
    """Return the staging buffer of a GPU, made at its first use."""
    return Staging(device)
