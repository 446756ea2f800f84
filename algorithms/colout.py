"""ColOut: random rows and columns of images are removed, which makes them smaller."""

from __future__ import annotations

import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import Key, get_images, with_item


def draw_kept(length: int, share: float, generator: torch.Generator) -> Tensor:
    """Return which rows or columns to keep, in order: (max(1, int((1 - share) length)),), int64, on the CPU."""
    kept = max(1, int((1 - share) * length))
    return torch.randperm(length, generator=generator)[:kept].sort().values


def remove_lines(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return images of the given rows and columns only.

    Args:
        images: (N, C, H, W).
        rows: (h,), int64.
        columns: (w,), int64.

    Returns:
        (N, C, h, w).
    """
    return images[:, :, rows[:, None], columns]


class ColOut(Algorithm):
    """Removes the same random rows and columns from all images of a training batch.

    The model must accept images that are smaller than those of an evaluation. What is drawn is a function of (seed,
    config key, batch) alone, differs between ranks, and is drawn for the whole batch however it is split: nothing has
    to be saved. How many are removed is always the same.

    Args:
        p_row: share of the rows to remove, in [0, 1]; at least one row stays.
        p_col: share of the columns, likewise.
        input_key: where the images (N, C, H, W) stand in a batch.

    Raises:
        ValueError: an argument is out of range; while training, inputs are no images.

    Evidence:
        Some for speed, as smaller images cost less; it loses some accuracy, so compare at equal time (MosaicML
        Composer's measurements on ImageNet; there is no paper).
    """

    def __init__(self, p_row: float = 0.15, p_col: float = 0.15, input_key: Key = 0) -> None:
        check_range("p_row", p_row, 0, 1)
        check_range("p_col", p_col, 0, 1)
        self.p_row = p_row
        self.p_col = p_col
        self.input_key = input_key

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_images(state.batch, self.input_key, "ColOut")
        seed = stream_seed(state.seed, self.config_key, state.timestamp.batch)
        generator = torch.Generator().manual_seed(seed)
        kept = [
            draw_kept(length, share, generator).to(images.device, non_blocking=True)
            for length, share in zip(images.shape[2:], (self.p_row, self.p_col), strict=True)
        ]
        state.batch = with_item(state.batch, self.input_key, remove_lines(images, *kept))
