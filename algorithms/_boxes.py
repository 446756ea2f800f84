"""Boxes at random places of an image, cut off at its edges."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor


def draw_boxes(
    count: int, box: tuple[int, int], size: tuple[int, int], uniform: bool, seed: int
) -> numpy.ndarray[Any, Any]:
    """Return where boxes begin and end: (count, 4), int64, as (top, left, bottom, right), ends excluded.

    Args:
        count: how many.
        box: height and width before a box is cut off.
        size: height and width of the image.
        uniform: centers are drawn also as far outside of the image as boxes reach in, so that each pixel is as likely
            to be covered; otherwise inside of it, as the papers do, which covers pixels at the edges less.
        seed: the draw depends on nothing else.
    """
    generator = numpy.random.default_rng(seed)
    starts, ends = [], []
    for length, whole in zip(box, size, strict=True):
        # A box of `length` from `start` on has its center at start + length // 2.
        low, high = (1 - length, whole) if uniform else (-(length // 2), whole - length // 2)
        start = generator.integers(low, max(high, low + 1), size=count)
        starts.append(start.clip(0, whole))
        ends.append((start + length).clip(0, whole))
    return numpy.stack([*starts, *ends], axis=1)


def cover(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which pixels lie in at least one of each image's boxes.

    Args:
        boxes: (N, K, 4), int64, as `draw_boxes` gives them.
        size: height H and width W.

    Returns:
        (N, H, W), bool, on the boxes' device.
    """
    rows, columns = (torch.arange(length, device=boxes.device) for length in size)
    top, left, bottom, right = (edge[..., None] for edge in boxes.unbind(-1))
    in_rows = (rows >= top) & (rows < bottom)  # (N, K, H)
    in_columns = (columns >= left) & (columns < right)  # (N, K, W)
    return (in_rows[..., None] & in_columns[..., None, :]).any(dim=1)
