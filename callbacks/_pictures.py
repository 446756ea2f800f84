"""Turns images and masks into pictures: uint8 arrays for display."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
GAP = 2  # pixels between two panels


def to_classes(values: Any, images: Tensor) -> Tensor | None:
    """Return a number (N,) or a mask (N, H, W) for each image, or None if the values give neither.

    Args:
        values: values for a batch that begins with the images: numbers (N,) or (N, 1), masks (N, H, W) or
            (N, 1, H, W), floating-point scores of C > 1 classes (N, C) or (N, C, H, W), or scores of a single class
            (N, 1, H, W).
        images: images (N, H, W, C).
    """
    if not isinstance(values, Tensor) or values.ndim not in (1, 2, 3, 4) or len(values) < len(images):
        return None
    values = values[: len(images)].detach()
    if values.ndim in (2, 4):
        if values.shape[1] == 1:
            values = values.squeeze(1)
            return (values > 0).long() if values.ndim == 3 and values.is_floating_point() else values
        return values.argmax(dim=1) if values.is_floating_point() else None
    return values


def read_together(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return tensors with the same dimension 0 as arrays, and None for None, in one transfer from the device.

    Values pass through float32, so integers above 2^24 lose their last digits.
    """
    kept = [one for one in tensors if one is not None]
    flat = torch.cat([one.reshape(len(one), -1).float() for one in kept], dim=1).cpu()
    parts = iter(flat.split([one[0].numel() for one in kept], dim=1))
    arrays: list[Any] = []
    for one in tensors:
        if one is None:
            arrays.append(None)
        else:
            part = next(parts).reshape(one.shape)
            arrays.append((part if one.is_floating_point() else part.to(one.dtype)).numpy())
    return arrays


def to_pictures(images: Array) -> npt.NDArray[np.uint8]:
    """Return images (N, H, W, C) as uint8, each stretched from its smallest to its largest value.

    Images that are uint8, or whose values all lie in [0, 1], keep their brightness.
    """
    if images.dtype == np.uint8:
        return images.astype(np.uint8)
    images = np.nan_to_num(images.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = (limit(images, axis=(1, 2, 3), keepdims=True) for limit in (np.min, np.max))
    if low.min() < 0.0 or high.max() > 1.0:
        images = (images - low) / np.where(high > low, high - low, 1.0)
    return np.rint(255 * images).astype(np.uint8)


def with_masks(pictures: npt.NDArray[np.uint8], masks: list[Array]) -> npt.NDArray[np.uint8]:
    """Return pictures with one more panel to the right per mask: the picture overlaid with the classes of the mask.

    Args:
        pictures: pictures (N, H, W, 1 or 3), uint8.
        masks: class numbers (N, H, W); class 0 and negative numbers are background and get no overlay.
    """
    pictures = np.repeat(pictures, 3, axis=3) if pictures.shape[3] == 1 else pictures
    gap = np.full_like(pictures[:, :, :GAP], 255)
    panels = [pictures]
    for mask in masks:
        shown = mask > 0
        colors = palette(int(mask.max(initial=0)) + 1)[np.where(shown, mask, 0)]
        panels += [gap, np.where(shown[..., None], pictures // 2 + colors // 2, pictures)]
    return np.concatenate(panels, axis=2).astype(np.uint8)


def palette(count: int) -> npt.NDArray[np.uint8]:
    """Return distinct colors (count, 3), spaced by the golden ratio; a class has the same color for any count."""
    hues = (index * 0.618034 % 1.0 for index in range(count))
    return np.array([[255 * part for part in colorsys.hsv_to_rgb(hue, 0.85, 1.0)] for hue in hues], dtype=np.uint8)
