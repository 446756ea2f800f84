"""Shifts and flips of images, for a whole batch at once and on its device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, get_item, with_item

FLIPS = (None, "random", "alternating")


def shift_images(images: Tensor, shifts: Tensor, pad: int) -> Tensor:
    """Return each image moved by its own shift, zeros moving in at the edges.

    Args:
        images: (N, C, H, W).
        shifts: (N, 2), int64: where in the padded image its window starts, down and to the right, each in
            [0, 2 pad]; `pad` leaves the image where it is, more moves its content up or to the left.
        pad: zeros around the image, in pixels.

    Returns:
        (N, C, H, W).
    """
    height, width = images.shape[2:]
    windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, shifts[:, 0], shifts[:, 1]]


def flip_images(images: Tensor, flipped: Tensor) -> Tensor:
    """Return images mirrored left to right where asked.

    Args:
        images: (N, C, H, W).
        flipped: (N,), bool.

    Returns:
        (N, C, H, W).
    """
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


class BatchAugment(Algorithm):
    """Shifts and mirrors the images of each training batch, as a few tensor operations for all of them.

    What is drawn is a function of (seed, config key, batch) alone: nothing has to be saved for a resumed run to draw
    the same, and splitting into microbatches changes nothing.

    Args:
        pad: largest shift in pixels, each way, drawn evenly for each image; at least 0, which shifts nothing.
        flip: None; 'random': each image is mirrored or not, evenly; 'alternating': likewise in epoch 0, and every
            other epoch the opposite, so that two epochs show both sides of each image. The latter needs a train
            dataloader that says which samples make up a batch: one with `order`, as those of `runner.data`.
        input_key: where the images (N, C, H, W) stand in a batch.

    Raises:
        ValueError: an argument is out of range; while training, inputs are no images, or 'alternating' is asked for
            of a dataloader without `order`.

    Evidence:
        Strong for natural images with more than a few epochs; do not flip where sides matter (digits, text).
        Alternating: some (Jordan 2024, arXiv:2404.00498).
    """

    def __init__(self, pad: int = 1, flip: str | None = None, input_key: Key = 0) -> None:
        if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
            raise ValueError(f"pad={pad!r}: must be a whole number of pixels, at least 0")
        if flip not in FLIPS:
            raise ValueError(f"flip={flip!r}: must be None, 'random' or 'alternating'")
        self.pad = pad
        self.flip = flip
        self.input_key = input_key
        self._sides = torch.empty(0, dtype=torch.bool)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.flip != "alternating":
            return
        order = getattr(state.train_dataloader, "order", None)
        if order is None:
            raise ValueError(
                f"flip='alternating' must know which samples make up a batch, and the train dataloader "
                f"({type(state.train_dataloader).__name__}) has no `order`: use one of runner.data, or flip='random'"
            )
        # Of the run, not of the rank: a sample may come to another rank in the next epoch.
        generator = torch.Generator().manual_seed(stream_seed(state.rank_zero_seed, self.config_key))
        self._sides = torch.randint(2, (order.num_samples,), generator=generator, dtype=torch.bool)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_item(state.batch, self.input_key)
        if images.ndim != 4:
            raise ValueError(f"inputs of shape {tuple(images.shape)}: BatchAugment needs images (N, C, H, W)")
        seed = stream_seed(state.seed, self.config_key, state.timestamp.batch)
        generator = torch.Generator().manual_seed(seed)
        if self.pad:
            shifts = torch.randint(2 * self.pad + 1, (len(images), 2), generator=generator)
            images = shift_images(images, shifts.to(images.device, non_blocking=True), self.pad)
        if self.flip == "random":
            flipped = torch.randint(2, (len(images),), generator=generator, dtype=torch.bool)
            images = flip_images(images, flipped.to(images.device, non_blocking=True))
        elif self.flip == "alternating":
            images = flip_images(images, self._alternating(state).to(images.device, non_blocking=True))
        state.batch = with_item(state.batch, self.input_key, images)

    def _alternating(self, state: State) -> Tensor:
        now = state.timestamp
        order = state.train_dataloader.order  # type: ignore[union-attr]
        return self._sides[order.indices(now.epoch, now.batch_in_epoch)] ^ bool(now.epoch % 2)
