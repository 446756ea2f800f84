"""Random shifts and flips of images, for a whole batch at once on its device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, get_item, with_item
from runner.failures.checks import check_one_of, check_whole

FLIPS = (None, "random", "alternating")


def shift_images(images: Tensor, shifts: Tensor, pad: int) -> Tensor:
    """Return images of the same size, each moved by its own shift, with zeros at the edges.

    Args:
        images: images (N, C, H, W).
        shifts: position (N, 2), int64, of each image's window in the padded image, down and to the right, from 0
            to 2 * pad. A position of `pad` leaves the image unchanged; a larger one moves its content up or left.
        pad: width of the border of zeros around the image, in pixels.
    """
    height, width = images.shape[2:]
    windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, shifts[:, 0], shifts[:, 1]]


def flip_images(images: Tensor, flipped: Tensor) -> Tensor:
    """Return images, some of them mirrored left to right.

    Args:
        images: images (N, C, H, W).
        flipped: mask (N,), bool, of the images to mirror.
    """
    return torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)


class BatchAugment(Algorithm):
    """Shifts and mirrors the images of each training batch at random, with a few tensor operations for the whole batch.

    The draws depend only on (seed, config key, batch), so a resumed run repeats them without any saved state, and
    splitting into microbatches changes nothing.

    Args:
        pad: largest shift each way, in pixels, drawn uniformly for each image; 0 for no shift.
        flip: None for no flips; 'random' to mirror each image with probability 1/2; 'alternating' to do so in epoch 0,
            and to invert each image's choice in odd epochs, so that two epochs show both sides of it. 'alternating'
            needs a train dataloader that knows which samples make up a batch: one with an `order`, like those of
            `runner.data`.
        input_key: index or name of the images (N, C, H, W) in a batch.

    Raises:
        ValueError: an argument is out of range; at FIT_START, the dataloader has no `order`, which 'alternating' needs;
            or, during training, the inputs are not images.

    Evidence:
        Strong for natural images with more than a few epochs; do not flip where left and right matter (digits, text).
        Some for alternating flips (Jordan 2024, arXiv:2404.00498).
    """

    def __init__(self, pad: int = 1, flip: str | None = None, input_key: Key = 0) -> None:
        check_whole("pad", pad, 0, "a whole number of pixels")
        check_one_of("flip", flip, FLIPS)
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
                f"flip='alternating': needs to know which samples make up a batch, but the train dataloader "
                f"({type(state.train_dataloader).__name__}) has no `order`; use one of runner.data, or flip='random'"
            )
        # Equal on all ranks, because another rank may read the sample in the next epoch.
        generator = torch.Generator().manual_seed(stream_seed(state.rank_zero_seed, self.config_key))
        self._sides = torch.randint(2, (order.num_samples,), generator=generator, dtype=torch.bool)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_item(state.batch, self.input_key)
        if images.ndim != 4:
            raise ValueError(
                f"inputs of shape {tuple(images.shape)}: BatchAugment needs images (N, C, H, W); "
                "~algorithms.batch_augment leaves it out"
            )
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
        timestamp = state.timestamp
        order = state.train_dataloader.order  # type: ignore[union-attr]
        return self._sides[order.indices(timestamp.epoch, timestamp.batch_in_epoch)] ^ bool(timestamp.epoch % 2)
