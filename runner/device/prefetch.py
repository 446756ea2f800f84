"""Copy batches to a GPU beside the steps that run there, so that neither the host nor the GPU waits for a copy."""

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

    Nothing on the path of a batch waits for the GPU, so the host asks for a batch while the GPU still has steps before
    it to do. On the stream of these steps, the copy would come after them. Here it runs beside them, and only the steps
    that use the batch wait for it. No batch is read before it is asked for, so nothing else about reading changes.

    Tensors that are not in pinned memory are first copied to it: otherwise, above 64 KB, the host would wait for the
    stream. Torch's own cache of pinned memory is the ring of buffers: it gives a buffer out again once its copy to the
    GPU has ended. Objects, and tensors that are not plain, are moved by their own method `to`. Only of a `UserDict`,
    such as the `BatchEncoding` of transformers, the tensors in it are copied. `backend` makes streams, as `torch.cuda`
    does.
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
            moved.record_stream(steps)  # its memory is given out again only after the steps queued there
            return moved

        def move_object(one: Any) -> Any:
            if not isinstance(one, UserDict):
                return to_device(one, self._device)
            moved = copy(one)
            moved.update({key: map_tensors(value, move, objects=move_object) for key, value in one.items()})
            return moved

        batch = map_tensors(batch, move, objects=move_object)
        steps.wait_stream(self._stream)
        return batch


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host and can be pinned and copied unchanged."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return type(tensor) is Tensor and tensor.is_cpu and is_dense and not tensor.requires_grad


def pinned(tensor: Tensor) -> Tensor:
    """Return a tensor of the host in pinned memory, from which the host does not wait for a copy to a GPU."""
    # Tensor.pin_memory() would refuse windows that overlap.
    return tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that moves batches to a device."""
    return Prefetch(device) if device.type == "cuda" else partial(to_device, device=device)


def open_loader(loader: Any, device: torch.device) -> tuple[Callable[[], Iterator[Any]], Callable[[Any], Any] | None]:
    """Move a loader's data to a device, where it can; return how to iterate over it, and how to move its batches.

    Where its batches are moved to an accelerator, a loader with a method `untransformed`, which iterates without its
    `transform`, lets them travel as they are stored, and the transform comes after the move: images are then a quarter
    as many bytes, and tokens an eighth.

    Args:
        loader: any iterable of batches. With a method `to`, it moves its data itself; an attribute `resident` says
            whether it did.
        device: the device for the batches.

    Returns:
        A function that returns an iterator, and one from a batch to the batch on the device; None for batches that are
        there already.
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
