"""Reads images and masks back from the device, and draws masks over images."""

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
    """Return copies on the CPU of tensors with the same dimension 0, and None for None, in one transfer.

    Values pass through float32, so integers above 2^24 lose their last digits.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.reshape(len(tensor), -1).float() for tensor in present], dim=1).cpu()
    parts = iter(flat.split([tensor[0].numel() for tensor in present], dim=1))
    copies: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            copies.append(None)
        else:
            part = next(parts).reshape(tensor.shape)
            copies.append(part if tensor.is_floating_point() else part.to(tensor.dtype))
    return copies


def with_masks(pictures: npt.NDArray[np.uint8], masks: list[Tensor]) -> npt.NDArray[np.uint8]:
    """Return pictures with a panel on the right for each mask: the picture overlaid with colors of the mask's classes.

    Args:
        pictures: pictures (N, H, W, 1 or 3), uint8.
        masks: class numbers (N, H, W); class 0 and negative numbers are background and get no overlay.
    """
    pictures = np.repeat(pictures, 3, axis=3) if pictures.shape[3] == 1 else pictures
    gap = np.full_like(pictures[:, :, :GAP], 255)
    panels = [pictures]
    for mask in masks:
        numbers = mask.numpy()
        is_class = numbers > 0
        colors = palette(int(numbers.max(initial=0)) + 1)[np.where(is_class, numbers, 0)]
        panels += [gap, np.where(is_class[..., None], pictures // 2 + colors // 2, pictures)]
    return np.concatenate(panels, axis=2).astype(np.uint8)


def palette(count: int) -> npt.NDArray[np.uint8]:
    """Return distinct colors (count, 3), spaced by the golden ratio. A class has the same color for any count."""
    hues = (index * 0.618034 % 1.0 for index in range(count))
    return np.array(
        [[255 * channel for channel in colorsys.hsv_to_rgb(hue, 0.85, 1.0)] for hue in hues], dtype=np.uint8
    )
