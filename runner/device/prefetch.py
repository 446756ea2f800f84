"""Copy batches to a GPU while it runs steps, so that neither the host nor the GPU waits for a copy."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.device.batch import map_tensors, to_device


class Prefetch:
    """Copies batches to a GPU on a separate stream.

    The host never waits for the GPU, so it requests a batch while earlier steps are still queued on the GPU. On their
    stream, the copy would run after them. On a separate stream it runs alongside them, and only the steps that use the
    batch wait for it. No batch is read before it is requested, so nothing else about reading changes.

    Tensors that are not in pinned memory are first copied to it: otherwise, above 64 KB, the host would wait for the
    stream. Torch's cache of pinned memory serves as a ring of buffers: it reuses a buffer once its copy to the GPU has
    ended. Objects, and tensors that are not plain, are moved by their method `to`, except for a `UserDict` such as the
    `BatchEncoding` of transformers, whose tensors are copied. `backend` makes streams, like `torch.cuda`.
    """

    def __init__(self, device: torch.device, backend: Any = torch.cuda) -> None:
        self._device = device
        self._backend = backend
        self._stream = backend.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """Return a batch on the GPU, for work that is queued on the current stream from now on."""
        steps = self._backend.current_stream(self._device)

        def move(tensor: Tensor) -> Tensor:
            if not _is_plain(tensor):
                return tensor.to(self._device, non_blocking=True)
            with self._backend.stream(self._stream):
                moved = pinned(tensor).to(self._device, non_blocking=True)
            moved.record_stream(steps)  # its memory is reused only after the steps queued there
            return moved

        def move_object(item: Any) -> Any:
            if not isinstance(item, UserDict):
                return to_device(item, self._device)
            moved = copy(item)
            moved.update({key: map_tensors(value, move, objects=move_object) for key, value in item.items()})
            return moved

        batch = map_tensors(batch, move, objects=move_object)
        steps.wait_stream(self._stream)
        return batch


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host and can be pinned and copied unchanged."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and tensor.is_cpu and is_dense and not tensor.requires_grad


def pinned(tensor: Tensor) -> Tensor:
    """Return a host tensor in pinned memory, which can be copied to a GPU without waiting."""
    # Tensor.pin_memory() refuses tensors whose memory overlaps, such as windows.
    return tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that moves batches to a device."""
    return Prefetch(device) if device.type == "cuda" else partial(to_device, device=device)


def open_loader(loader: Any, device: torch.device) -> tuple[Callable[[], Iterator[Any]], Callable[[Any], Any] | None]:
    """Move a loader's data to a device, if possible; return how to iterate over it, and how to move its batches.

    A loader with a method `untransformed`, which iterates without its `transform`, sends batches to an accelerator as
    they are stored, and the transform follows on the device: images then take a quarter of the bytes, and tokens an
    eighth.

    Args:
        loader: any iterable of batches. If it has a method `to`, it moves its data itself; an attribute `resident` says
            whether it did.
        device: the device for the batches.

    Returns:
        A function that returns an iterator, and a function that moves a batch to the device; None if the batches are
        on it already.
    """
    if hasattr(loader, "to"):
        loader.to(device)
        if getattr(loader, "resident", True):
            return partial(iter, loader), None
    move = mover(device)
    transform = getattr(loader, "transform", None)
    if transform is None or device.type == "cpu" or not hasattr(loader, "untransformed"):
        return partial(iter, loader), move
    return loader.untransformed, lambda batch: transform(move(batch))
