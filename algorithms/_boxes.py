"""Boxes at random positions in an image, clipped at its edges."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor


def draw_boxes(
    count: int, box: tuple[int, int], size: tuple[int, int], uniform: bool, seed: int
) -> numpy.ndarray[Any, Any]:
    """Return random boxes (count, 4), int64, as (top, left, bottom, right) in pixels, ends excluded.

    Args:
        count: number of boxes.
        box: height and width of a box before it is clipped.
        size: height and width of the image.
        uniform: whether each pixel is equally likely to be covered. A box may then start anywhere from 1 - length to
            the image's side - 1, so that `length` of the possible starts cover each pixel; centers may lie outside.
            Otherwise centers lie inside the image, as in the papers, and pixels near the edges are covered less often.
        seed: seed of the draw; equal arguments give equal boxes.
    """
    generator = numpy.random.default_rng(seed)
    starts = []
    ends = []
    for length, whole in zip(box, size, strict=True):
        # A box of this length that begins at `start` has its center at start + length // 2.
        low, high = (1 - length, whole) if uniform else (-(length // 2), whole - length // 2)
        start = generator.integers(low, max(high, low + 1), size=count)
        starts.append(start.clip(0, whole))
        ends.append((start + length).clip(0, whole))
    return numpy.stack([*starts, *ends], axis=1)


def cover(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return which pixels lie in at least one of each image's boxes: (N, H, W), bool, on the boxes' device.

    Args:
        boxes: boxes (N, K, 4), int64, as returned by `draw_boxes`.
        size: height H and width W of the image.
    """
    rows, columns = (torch.arange(length, device=boxes.device) for length in size)
    top, left, bottom, right = (edge[..., None] for edge in boxes.unbind(-1))
    in_rows = (rows >= top) & (rows < bottom)  # (N, K, H)
    in_columns = (columns >= left) & (columns < right)  # (N, K, W)
    return (in_rows[..., None] & in_columns[..., None, :]).any(dim=1)
