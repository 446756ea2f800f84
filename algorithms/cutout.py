"""CutOut: squares of each image are set to zero."""

from __future__ import annotations

import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, get_images, with_item
from runner.algorithms._boxes import cover, draw_boxes
from runner.failures.checks import check_number, check_whole


def cut_out(images: Tensor, holes: Tensor) -> Tensor:
    """Return images with rectangles set to zero.

    Args:
        images: images (N, C, H, W).
        holes: boxes (N, K, 4), int64, of each image: top, left, bottom, right in pixels, ends excluded.
    """
    height, width = images.shape[2:]
    return images.masked_fill(cover(holes, (height, width))[:, None], 0)


class CutOut(Algorithm):
    """Sets squares of each training image to zero, at random positions, drawn for each image.

    The draws depend only on (seed, config key, batch), differ between ranks, and are made for the whole batch before it
    is split into microbatches, so nothing has to be saved. Zero should be the mean of the images, or black.

    Args:
        num_holes: number of squares per image, at least 1; they may overlap, and are clipped at the edges.
        length: side of a square, as a fraction of the shorter side of the image, above 0 and at most 1.
        uniform_sampling: whether to place squares so that each pixel is equally likely to be covered; otherwise their
            centers lie inside the image, as in the paper, and pixels near the edges are covered less often.
        input_key: index or name of the images (N, C, H, W) in a batch.

    Raises:
        ValueError: an argument is out of range; or, during training, the inputs are not images.

    Evidence:
        Some, for small natural images with many epochs (DeVries and Taylor 2017, arXiv:1708.04552). It hurts if
        objects are small; no gain is known on top of CutMix or MixUp.
    """

    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: Key = 0
    ) -> None:
        check_whole("num_holes", num_holes, 1)
        check_number("length", length, "(0, 1]")
        self.num_holes = num_holes
        self.length = length
        self.uniform_sampling = uniform_sampling
        self.input_key = input_key

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_images(state.batch, self.input_key, "CutOut")
        height, width = images.shape[2:]
        side = max(1, int(self.length * min(height, width)))
        seed = stream_seed(state.seed, self.config_key, state.timestamp.batch)
        count = len(images) * self.num_holes
        holes = draw_boxes(count, (side, side), (height, width), self.uniform_sampling, seed)
        holes = torch.from_numpy(holes).view(len(images), self.num_holes, 4).to(images.device, non_blocking=True)
        state.batch = with_item(state.batch, self.input_key, cut_out(images, holes))
