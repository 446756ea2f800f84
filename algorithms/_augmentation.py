"""Base class of TrivialAugment, RandAugment and AugMix: undoes the normalization of images, and applies it again.

The operations are written in torch and run on the batch's device, so torchvision is not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy
import torch
from torch import Tensor

from runner import Algorithm, Logger, State, stream_seed
from runner.algorithms._batch import Key, get_images, get_item, with_item
from runner.algorithms._first_batch import first_batch
from runner.data import Normalization
from runner.data.images.normalization import PerChannel, per_channel
from runner.failures.checks import check_number, refuse_if

MAX_SEVERITY = 10.0
TOLERANCE = 0.2
"""Distance outside [0, 1] that rounding and interpolation cannot explain."""

MAX_SHARE = 0.05
"""Largest allowed share of values outside that tolerance; in images that are still normalized it is much larger."""


class Augmentation(Algorithm, ABC):
    """Base of algorithms that augment each training image separately; a subclass defines `augment`."""

    def __init__(self, severity: float, mean: PerChannel | None, std: PerChannel | None, input_key: Key) -> None:
        check_number("severity", severity, f"(0, {MAX_SEVERITY}]")
        Normalization(0.0 if mean is None else mean, 1.0 if std is None else std)  # checks them
        self.mean = mean
        self.std = std
        self.severity = severity
        self.input_key = input_key
        self._normalization: Normalization | None = None
        self._is_checked = False

    @abstractmethod
    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        """Return augmented images (N, C, H, W); images are in [0, 1], and all random draws come from the generator."""

    def fit_start(self, state: State, logger: Logger) -> None:
        self._is_checked = False
        self._normalization = self._normalization_of(state.train_dataloader)
        batch = first_batch(state.train_dataloader)
        if batch is not None:
            self._denormalize(batch)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images, mean, std = self._denormalize(state.batch)
        generator = numpy.random.default_rng(stream_seed(state.seed, self.config_key, state.timestamp.batch))
        augmented = (self.augment(images.clamp(0, 1), generator) - mean) / std
        state.batch = with_item(state.batch, self.input_key, augmented.to(get_item(state.batch, self.input_key).dtype))

    def _denormalize(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images of a batch in [0, 1], with the mean and the standard deviation to normalize them again."""
        images = get_images(batch, self.input_key, type(self).__name__)
        normalization = self._normalization
        assert normalization is not None
        for name, values in (("mean", normalization.mean), ("std", normalization.std)):
            if len(values) not in (1, images.shape[1]):
                raise ValueError(
                    f"{name}={[*values]}: the images have {images.shape[1]} channels; "
                    "give one number for all channels, or one per channel"
                )
        dtype = torch.promote_types(images.dtype, torch.float32)
        mean, std = normalization.tensors(images.device, dtype)
        images = images.to(dtype) * std + mean
        if not self._is_checked and not images.is_meta:
            _refuse_normalized(images, normalization)
        self._is_checked = True
        return images, mean, std

    def _normalization_of(self, loader: Any) -> Normalization:
        """Return the normalization that the data declares; if it declares none, that of the arguments.

        Raises:
            ValueError: an argument contradicts the data, or is missing.
        """
        declared = getattr(loader, "normalization", None)
        reason = "the data do not say how images are normalized; set mean and std, 0.0 and 1.0 for images in [0, 1]"
        for name, value in (("mean", self.mean), ("std", self.std)):
            if declared is None:
                refuse_if(value is None, name, None, reason)
            elif value is not None:
                actual, known = per_channel(value), getattr(declared, name)
                channels = max(len(actual), len(known))
                differs = actual * (channels // len(actual)) != known * (channels // len(known))
                refuse_if(differs, name, value, f"the data were normalized with {name}={[*known]}; leave {name} out")
        return Normalization(self.mean, self.std) if declared is None else declared  # type: ignore[arg-type]


def _refuse_normalized(images: Tensor, normalization: Normalization) -> None:
    outside = (images - 0.5).abs() > 0.5 + TOLERANCE
    if outside.to(images.dtype).mean() > MAX_SHARE:  # an intended host-device sync, once per fit
        low = images.min().item()
        high = images.max().item()
        raise ValueError(
            f"mean={[*normalization.mean]}, std={[*normalization.std]}: images times std plus mean must be between "
            f"0 (black) and 1 (white), not between {low:.3g} and {high:.3g}; "
            "set both to the values that the data were normalized with"
        )
