"""TrivialAugment: one operation of random strength for each image."""

from __future__ import annotations

import numpy
from torch import Tensor

from runner.algorithms._augmentation import MAX_SEVERITY, Augmentation, PerChannel
from runner.algorithms._batch import Key
from runner.algorithms._image_operations import ALL, apply_each


def trivial_augment(images: Tensor, strength: float, generator: numpy.random.Generator) -> Tensor:
    """Apply a random one of fourteen operations to each image, with a strength drawn uniformly.

    Args:
        images: images (N, C, H, W), in [0, 1].
        strength: largest strength, in [0, 1].
        generator: source of all random draws.
    """
    chosen = generator.integers(len(ALL), size=len(images))
    return apply_each(images, ALL, chosen, generator.uniform(-strength, strength, size=len(images)))


class TrivialAugment(Augmentation):
    """Changes each training image by one random operation of random strength, with nothing to tune.

    The operations are those of RandAugment: identity, autocontrast, equalize, posterize, solarize, rotate, shear and
    translate in both directions, color, contrast, brightness, sharpness. They are torch operations on the batch's
    device, see `runner.algorithms._image_operations`. The draws depend only on (seed, config key, batch), differ
    between ranks, and are made for the whole batch before it is split into microbatches, so nothing has to be saved.

    Args:
        severity: largest strength, above 0 and at most 10; 10 is the paper's value: 30 degrees, shear 0.3, 45 % of
            the side, 4 bits, a factor of 0.1 or 1.9.
        mean: mean that was subtracted from the images, which were in [0, 1] before; one number, or one per channel.
            None: that of the data, see the attribute `normalization` of the training loader.
        std: standard deviation that the images were then divided by, above 0; like `mean`.
        input_key: index or name of the images (N, C, H, W) in a batch.

    Raises:
        ValueError: an argument is out of range; or, at FIT_START or at the first batch, the inputs are not images, do
            not have the channels of `mean` and `std`, or are not in [0, 1] once the normalization is undone; or the
            normalization is unknown, or `mean` or `std` contradicts the data.

    Evidence:
        Strong for natural images with many epochs (Müller and Hutter 2021, arXiv:2103.10158), as good as searched
        policies; none for small gray images, where equalizing and solarizing make no sense.
    """

    def __init__(
        self,
        severity: float = MAX_SEVERITY,
        mean: PerChannel | None = None,
        std: PerChannel | None = None,
        input_key: Key = 0,
    ) -> None:
        super().__init__(severity, mean, std, input_key)

    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        return trivial_augment(images, self.severity / MAX_SEVERITY, generator)
