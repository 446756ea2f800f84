"""Functions on batches, shared by algorithms: get and replace parts, resize images, select samples, read targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner import Algorithm
from runner.device.batch import map_samples

Key = int | str
"""The index of a part of a batch in a tuple or list, or its key in a mapping."""

IGNORED = -100  # target that torch's own losses ignore

AUGMENTATIONS = (
    "BatchAugment",
    "TrivialAugment",
    "RandAugment",
    "AugMix",
    "CutOut",
    "ColOut",
    "ProgressiveResizing",
)
"""Algorithms that change each sample separately; an algorithm that only selects samples runs before them."""


def get_item(batch: Any, key: Key) -> Tensor:
    """Return one tensor of a batch."""
    if not isinstance(batch, Mapping | tuple | list):
        raise TypeError(
            f"part {key!r} of the batch: the batch is a {type(batch).__name__}; "
            "it must be a tuple, list or mapping, such as (inputs, targets)"
        )
    try:
        item = batch[key]  # type: ignore[index]
    except (LookupError, TypeError) as error:
        parts = ", ".join(map(repr, batch if isinstance(batch, Mapping) else range(len(batch))))
        remedy = "set input_key and target_key to where the batch holds inputs and targets"
        raise ValueError(f"part {key!r} of the batch: the batch has the parts {parts}; {remedy}") from error
    if not isinstance(item, Tensor):
        raise TypeError(f"part {key!r} of the batch is a {type(item).__name__}; it must be a tensor")
    return item


def with_item(batch: Any, key: Key, value: Tensor) -> Any:
    """Return a new batch of the same type with one part replaced; the given batch is left unchanged."""
    if isinstance(batch, Mapping):
        return {**batch, key: value}
    items = list(batch)
    items[key] = value  # type: ignore[call-overload]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def class_probabilities(targets: Tensor, logits: Tensor) -> Tensor:
    """Return targets as class probabilities in the shape of the logits.

    Targets of -100 become rows of zeros. If m of n positions count, the other rows sum to n / m instead of 1: a mean
    over all n positions is then the mean over the m that count, as in torch's own cross entropy. Nothing is read back
    from the device.

    Args:
        targets: class indices (N, ...), or one-hot vectors or probabilities (N, C, ...).
        logits: logits (N, C, ...).

    Returns:
        Probabilities (N, C, ...), in the logits' dtype, but at least float32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if targets.shape == logits.shape:
        return targets.to(dtype)
    if logits.ndim < 2 or targets.is_floating_point() or targets.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} and {targets.dtype} do not match outputs of shape "
            f"{tuple(logits.shape)}: give class indices (N, ...) or probabilities (N, C, ...) for outputs (N, C, ...)"
        )
    counted = targets != IGNORED
    ones = targets.numel() / counted.sum().clamp(min=1).to(dtype) * counted
    index = targets.long().where(counted, 0).unsqueeze(1)
    return torch.zeros(logits.shape, dtype=dtype, device=logits.device).scatter_(1, index, ones.unsqueeze(1))


def get_images(batch: Any, key: Key, owner: str) -> Tensor:
    """Return the images of a batch, floating point (N, C, H, W)."""
    images = get_item(batch, key)
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"inputs of shape {tuple(images.shape)} and {images.dtype}: "
            f"{owner} needs floating-point images (N, C, H, W)"
        )
    return images


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images (N, C, H, W) resized to (height, width).

    Floating-point images are interpolated bilinearly with antialiasing; others take the nearest pixel.
    """
    if images.is_floating_point():  # in at least 32 bits, because torch cannot antialias 16 bits on the CPU
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        return F.interpolate(wide, size, mode="bilinear", antialias=True).to(images.dtype)
    rows, columns = (
        torch.arange(new, device=images.device) * old // new for new, old in zip(size, images.shape[2:], strict=True)
    )
    return images[:, :, rows[:, None], columns]


def pick_samples(batch: Any, num_samples: int, index: Tensor | slice) -> Any:
    """Return a batch with some of its samples; tensors and lists without one entry per sample stay unchanged.

    Args:
        batch: any nesting of tensors and lists, such as lists of file names; lists are indexed on the host.
        num_samples: number of samples in the batch.
        index: samples to keep: indices (n,), int64, on the batch's device, or a slice, which gives views.
    """

    def pick(items: Any) -> Any:
        # An intended host-device sync, for batches with lists only.
        return items[index] if isinstance(index, slice) else type(items)(items[position] for position in index.tolist())

    def pick_rows(tensor: Tensor) -> Tensor:
        return tensor[index] if tensor.ndim and len(tensor) == num_samples else tensor

    return map_samples(batch, num_samples, pick_rows, pick)


def refuse_alternating_flips(algorithms: Iterable[Algorithm]) -> None:
    """Refuse BatchAugment's alternating flips, which need whole batches, if an algorithm drops samples."""
    if any(getattr(algorithm, "flip", None) == "alternating" for algorithm in algorithms):
        raise ValueError(
            "flip='alternating': BatchAugment needs whole batches for this, but another algorithm drops samples; "
            "set flip='random', or remove one of the two algorithms"
        )
