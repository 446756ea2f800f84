"""ColOut: random rows and columns of images are removed, which makes the images smaller."""

from __future__ import annotations

import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, get_images, with_item
from runner.failures.checks import check_numbers


def draw_kept(length: int, share: float, generator: torch.Generator) -> Tensor:
    """Return sorted indices, int64, on the CPU, of the max(1, int((1 - share) * length)) rows or columns to keep.

    Args:
        length: number of rows or columns.
        share: fraction to remove, in [0, 1].
        generator: source of the random draw.
    """
    kept = max(1, int((1 - share) * length))
    return torch.randperm(length, generator=generator)[:kept].sort().values


def remove_lines(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return images (N, C, h, w) that keep only the given rows and columns.

    Args:
        images: images (N, C, H, W).
        rows: indices (h,), int64, of the rows to keep.
        columns: indices (w,), int64, of the columns to keep.
    """
    return images[:, :, rows[:, None], columns]


class ColOut(Algorithm):
    """Removes the same random rows and columns from all images of a training batch.

    The model must accept training images that are smaller than those it is evaluated on. The draws depend only on
    (seed, config key, batch), differ between ranks, and are made for the whole batch before it is split into
    microbatches, so nothing has to be saved. The number of rows and columns removed is always the same.

    Args:
        p_row: fraction of the rows to remove, in [0, 1]; at least one row is kept.
        p_col: fraction of the columns to remove, in [0, 1]; at least one column is kept.
        input_key: index or name of the images (N, C, H, W) in a batch.

    Raises:
        ValueError: an argument is out of range; or, during training, the inputs are not images.

    Evidence:
        Some for speed, because smaller images cost less. It loses some accuracy, so compare at equal time (MosaicML
        Composer's measurements on ImageNet; there is no paper).
    """

    def __init__(self, p_row: float = 0.15, p_col: float = 0.15, input_key: Key = 0) -> None:
        check_numbers("[0, 1]", p_row=p_row, p_col=p_col)
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
