"""What several algorithms do with a batch: reach its parts by key, resize or replace them, read its targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runner import Algorithm
from runner.batch import map_samples

Key = int | str
"""Where a part of a batch stands: an index of a tuple or list, or a key of a mapping."""

IGNORED = -100  # the target that torch's own losses leave out

AUGMENTATIONS = (
    "BatchAugment",
    "TrivialAugment",
    "RandAugment",
    "AugMix",
    "CutOut",
    "ColOut",
    "ProgressiveResizing",
)
"""Algorithms that change the samples of a batch one by one: who only picks samples runs before them."""


def get_item(batch: Any, key: Key) -> Tensor:
    """Return one tensor of a batch.

    Raises:
        TypeError: the batch has no parts, or the part is no tensor.
    """
    if not isinstance(batch, Mapping | tuple | list):
        raise TypeError(f"part {key!r} of a batch of type {type(batch).__name__}: it must be (inputs, targets)")
    item = batch[key]  # type: ignore[index]
    if not isinstance(item, Tensor):
        raise TypeError(f"part {key!r} of the batch is a {type(item).__name__}; it must be a tensor")
    return item


def with_item(batch: Any, key: Key, value: Tensor) -> Any:
    """Return a new batch of the same kind in which one part is replaced; the batch itself stays as it is."""
    if isinstance(batch, Mapping):
        return {**batch, key: value}
    items = list(batch)
    items[key] = value  # type: ignore[call-overload]
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def class_probabilities(targets: Tensor, logits: Tensor) -> Tensor:
    """Return targets as probabilities over classes, in the shape of the logits.

    Targets of -100 become rows of zeros, and the others are scaled up so that a mean over all positions is the mean
    over those that count, as in torch's own cross entropy. Nothing is read back from the device.

    Args:
        targets: class numbers (N, ...), or one-hot or probabilities (N, C, ...).
        logits: (N, C, ...).

    Returns:
        (N, C, ...), in the logits' dtype, but at least float32.

    Raises:
        ValueError: the shapes do not belong together.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if targets.shape == logits.shape:
        return targets.to(dtype)
    if logits.ndim < 2 or targets.is_floating_point() or targets.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} and {targets.dtype} do not belong to outputs of shape "
            f"{tuple(logits.shape)}: give class numbers (N, ...) or probabilities (N, C, ...) for outputs (N, C, ...)"
        )
    counted = targets != IGNORED
    ones = targets.numel() / counted.sum().clamp(min=1).to(dtype) * counted
    index = targets.long().where(counted, 0).unsqueeze(1)
    return torch.zeros(logits.shape, dtype=dtype, device=logits.device).scatter_(1, index, ones.unsqueeze(1))


def get_images(batch: Any, key: Key, owner: str) -> Tensor:
    """Return the images of a batch, floating point (N, C, H, W).

    Raises:
        TypeError: as `get_item`.
        ValueError: the part is something else; `owner` says who wants them.
    """
    images = get_item(batch, key)
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(
            f"inputs of shape {tuple(images.shape)} and {images.dtype}: "
            f"{owner} needs floating-point images (N, C, H, W)"
        )
    return images


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images (N, C, H, W) in another size: bilinear and antialiased; other than floating point, the nearest."""
    if images.is_floating_point():  # in 32 bits or more, as torch cannot antialias 16 on the CPU
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        return F.interpolate(wide, size, mode="bilinear", antialias=True).to(images.dtype)
    rows, columns = (
        torch.arange(new, device=images.device) * old // new for new, old in zip(size, images.shape[2:], strict=True)
    )
    return images[:, :, rows[:, None], columns]


def pick_samples(batch: Any, num_samples: int, index: Tensor | slice) -> Any:
    """Return a batch with some of its samples; tensors and lists that do not count samples stay as they are.

    Args:
        batch: any nesting of tensors, and of lists of samples or of texts such as file names, picked on the host.
        num_samples: samples in it.
        index: which of them: numbers (n,), int64, on the batch's device, or a slice, which gives views.
    """

    def pick(items: Any) -> Any:
        # The intended host-device sync, of batches with lists only.
        return items[index] if isinstance(index, slice) else type(items)(items[one] for one in index.tolist())

    return map_samples(
        batch, num_samples, lambda one: one[index] if one.ndim and len(one) == num_samples else one, pick
    )


def refuse_alternating_flips(algorithms: Iterable[Algorithm]) -> None:
    """Raise a ValueError where BatchAugment must know which samples a batch has; for those that leave some out."""
    if any(getattr(one, "flip", None) == "alternating" for one in algorithms):
        raise ValueError(
            "flip='alternating' of BatchAugment needs whole batches, and another algorithm leaves samples out: "
            "set flip='random', or remove one of them"
        )
