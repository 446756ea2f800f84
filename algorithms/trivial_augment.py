"""TrivialAugment: one operation of random strength for each image."""

from __future__ import annotations

import numpy
from torch import Tensor

from runner.algorithms._augmentation import MAX_SEVERITY, Augmentation, PerChannel
from runner.algorithms._batch import Key
from runner.algorithms._image_operations import ALL, apply_each


def trivial_augment(images: Tensor, strength: float, generator: numpy.random.Generator) -> Tensor:
    """Return each image after one operation out of fourteen, with a strength drawn evenly.

    Args:
        images: (N, C, H, W), in [0, 1].
        strength: the largest, in [0, 1].
        generator: what all draws come from.

    Returns:
        (N, C, H, W), in [0, 1].
    """
    chosen = generator.integers(len(ALL), size=len(images))
    return apply_each(images, ALL, chosen, generator.uniform(-strength, strength, size=len(images)))


class TrivialAugment(Augmentation):
    """Changes each training image by one random operation of random strength: nothing has to be tuned.

    The operations are those of RandAugment, see `runner.algorithms._image_operations`: identity, autocontrast,
    equalize, posterize, solarize, rotate, shear and translate in both directions, color, contrast, brightness,
    sharpness. They are torch operations on the batch's device. What is drawn is a function of (seed, config key,
    batch) alone, differs between ranks, and is drawn for the whole batch however it is split: nothing has to be
    saved.

    Args:
        severity: the largest strength, above 0 and at most 10, which is the paper's: 30 degrees, shear 0.3, 45 % of the
            side, 4 bits, a factor of 0.1 or 1.9.
        mean: that was subtracted from images between 0 (black) and 1 (white): one number, or one per channel.
        std: that they were divided by after that, above 0.
        input_key: where the images (N, C, H, W) stand in a batch.

    Raises:
        ValueError: an argument is out of range; at FIT_START or at the first batch, inputs are no images, not of as
            many channels as `mean` and `std`, or not between 0 and 1 once these are taken back.

    Evidence:
        Strong for natural images with many epochs (Müller and Hutter 2021, arXiv:2103.10158), as good as searched
        policies; none for small gray images, where equalizing and solarizing make no sense.
    """

    def __init__(
        self, severity: float = MAX_SEVERITY, mean: PerChannel = 0.0, std: PerChannel = 1.0, input_key: Key = 0
    ) -> None:
        super().__init__(severity, mean, std, input_key)

    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        return trivial_augment(images, self.severity / MAX_SEVERITY, generator)
