"""Reads images and masks back from the device, and lays masks over images."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GAP = 2  # pixels between two panels


def read_together(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return tensors with the same dimension 0 on the CPU, and None for None, in one transfer from the device.

    Values pass through float32, so integers above 2^24 lose their last digits.
    """
    kept = [one for one in tensors if one is not None]
    flat = torch.cat([one.reshape(len(one), -1).float() for one in kept], dim=1).cpu()
    parts = iter(flat.split([one[0].numel() for one in kept], dim=1))
    read: list[Any] = []
    for one in tensors:
        if one is None:
            read.append(None)
        else:
            part = next(parts).reshape(one.shape)
            read.append(part if one.is_floating_point() else part.to(one.dtype))
    return read


def with_masks(pictures: npt.NDArray[np.uint8], masks: list[Tensor]) -> npt.NDArray[np.uint8]:
    """Return pictures with one more panel to the right per mask: the picture overlaid with the classes of the mask.

    Args:
        pictures: pictures (N, H, W, 1 or 3), uint8.
        masks: class numbers (N, H, W); class 0 and negative numbers are background and get no overlay.
    """
    pictures = np.repeat(pictures, 3, axis=3) if pictures.shape[3] == 1 else pictures
    gap = np.full_like(pictures[:, :, :GAP], 255)
    panels = [pictures]
    for mask in masks:
        numbers = mask.numpy()
        shown = numbers > 0
        colors = palette(int(numbers.max(initial=0)) + 1)[np.where(shown, numbers, 0)]
        panels += [gap, np.where(shown[..., None], pictures // 2 + colors // 2, pictures)]
    return np.concatenate(panels, axis=2).astype(np.uint8)


def palette(count: int) -> npt.NDArray[np.uint8]:
    """Return distinct colors (count, 3), spaced by the golden ratio; a class has the same color for any count."""
    hues = (index * 0.618034 % 1.0 for index in range(count))
    return np.array([[255 * part for part in colorsys.hsv_to_rgb(hue, 0.85, 1.0)] for hue in hues], dtype=np.uint8)
