"""What TrivialAugment, RandAugment and AugMix have in common: from a batch to images between black and white, and back.

Torch operations of our own do the work, on the batch's device: torchvision is not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._arguments import check_range
from runner.algorithms._batch import Key, get_images, get_item, with_item
from runner.algorithms._first_batch import first_batch

MAX_SEVERITY = 10.0
TOLERANCE, MAX_SHARE = 0.2, 0.05
"""How far outside [0, 1] a value is that no rounding and no interpolation explains, and the share of such values that
images may have. Images that are still normalized have many."""

PerChannel = float | Sequence[float]
"""One number for all channels, or one for each."""


class Augmentation(Algorithm, ABC):
    """Changes each training image by operations of its own; a subclass says which.

    Args:
        severity: strength of the operations, above 0 and at most 10.
        mean: that was subtracted from images between 0 (black) and 1 (white).
        std: that they were divided by after that, above 0.
        input_key: where the images (N, C, H, W) stand in a batch.

    Raises:
        ValueError: an argument is out of range; at FIT_START or at the first batch, inputs are no images, not of as
            many channels as `mean` and `std`, or not between 0 and 1 once these are taken back.
    """

    def __init__(self, severity: float, mean: PerChannel, std: PerChannel, input_key: Key) -> None:
        check_range("severity", severity, 0, MAX_SEVERITY, above=True)
        self.mean = torch.as_tensor(mean, dtype=torch.float64).reshape(-1)
        self.std = torch.as_tensor(std, dtype=torch.float64).reshape(-1)
        if not (self.std > 0).all():
            raise ValueError(f"std={std!r}: must be above 0, a number or one per channel")
        self.severity = severity
        self.input_key = input_key
        self._is_checked = False

    @abstractmethod
    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        """Return other images (N, C, H, W) in place of these, both in [0, 1]; draws come from the generator."""

    def fit_start(self, state: State, logger: Logger) -> None:
        self._is_checked = False
        batch = first_batch(state.train_dataloader)
        if batch is not None:
            self._denormalize(batch)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images, mean, std = self._denormalize(state.batch)
        generator = numpy.random.default_rng(stream_seed(state.seed, self.config_key, state.timestamp.batch))
        changed = (self.augment(images.clamp(0, 1), generator) - mean) / std
        state.batch = with_item(state.batch, self.input_key, changed.to(get_item(state.batch, self.input_key).dtype))

    def _denormalize(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return images of a batch between 0 and 1, and what they have to be normalized by again."""
        images = get_images(batch, self.input_key, type(self).__name__)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, images.shape[1]):
                raise ValueError(f"{name}={values.tolist()}: the images have {images.shape[1]} channels")
        dtype = torch.promote_types(images.dtype, torch.float32)
        mean, std = (one.to(images.device, dtype, non_blocking=True).view(-1, 1, 1) for one in (self.mean, self.std))
        images = images.to(dtype) * std + mean
        if not self._is_checked and not images.is_meta:
            self._refuse_normalized(images)
        self._is_checked = True
        return images, mean, std

    def _refuse_normalized(self, images: Tensor) -> None:
        outside = (images - 0.5).abs() > 0.5 + TOLERANCE
        if outside.to(images.dtype).mean() > MAX_SHARE:  # an intended host-device sync, once a fit
            mean, std, low, high = self.mean.tolist(), self.std.tolist(), images.min().item(), images.max().item()
            raise ValueError(
                f"mean={mean}, std={std}: images times std plus mean must be between 0 (black) and 1 (white), not "
                f"between {low:.3g} and {high:.3g}; set both to what the data were normalized by"
            )
