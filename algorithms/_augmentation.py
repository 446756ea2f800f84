"""What TrivialAugment, RandAugment and AugMix have in common: from a batch to images between black and white, and back.

Torch operations of our own do the work, on the batch's device: torchvision is not needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from algorithms._arguments import check_range
from algorithms._batch import Key, get_images, with_item
from runner import Algorithm, Logger, State, stream_seed

MAX_SEVERITY = 10.0

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
        ValueError: an argument is out of range; while training, inputs are no images, or not of as many channels as
            `mean` and `std`.
    """

    def __init__(self, severity: float, mean: PerChannel, std: PerChannel, input_key: Key) -> None:
        check_range("severity", severity, 0, MAX_SEVERITY, above=True)
        self.mean = torch.as_tensor(mean, dtype=torch.float64).reshape(-1)
        self.std = torch.as_tensor(std, dtype=torch.float64).reshape(-1)
        if not (self.std > 0).all():
            raise ValueError(f"std={std!r}: must be above 0, a number or one per channel")
        self.severity = severity
        self.input_key = input_key

    @abstractmethod
    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        """Return other images (N, C, H, W) in place of these, both in [0, 1]; draws come from the generator."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        images = get_images(state.batch, self.input_key, type(self).__name__)
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, images.shape[1]):
                raise ValueError(f"{name}={values.tolist()}: the images have {images.shape[1]} channels")
        dtype = torch.promote_types(images.dtype, torch.float32)
        mean, std = (one.to(images.device, dtype, non_blocking=True).view(-1, 1, 1) for one in (self.mean, self.std))
        generator = numpy.random.default_rng(stream_seed(state.seed, self.config_key, state.timestamp.batch))
        changed = self.augment((images.to(dtype) * std + mean).clamp(0, 1), generator)
        state.batch = with_item(state.batch, self.input_key, ((changed - mean) / std).to(images.dtype))
