"""RandAugment: several operations of equal strength for each image."""

from __future__ import annotations

import numpy
from torch import Tensor

from runner.algorithms._augmentation import MAX_SEVERITY, Augmentation, PerChannel
from runner.algorithms._batch import Key
from runner.algorithms._image_operations import ALL, apply_each
from runner.checks import check_whole


def rand_augment(images: Tensor, strength: float, depth: int, generator: numpy.random.Generator) -> Tensor:
    """Return each image after `depth` operations out of fourteen, one after another.

    Args:
        images: (N, C, H, W), in [0, 1].
        strength: of all of them, in [0, 1]; the direction, where there are two, is drawn.
        depth: at least 0.
        generator: what all draws come from.

    Returns:
        (N, C, H, W), in [0, 1].
    """
    for _ in range(depth):
        chosen = generator.integers(len(ALL), size=len(images))
        images = apply_each(images, ALL, chosen, generator.choice([-strength, strength], size=len(images)))
    return images


class RandAugment(Augmentation):
    """Changes each training image by a few random operations of one strength.

    The operations are those of TrivialAugment: torch operations on the batch's device. What is drawn is a function of
    (seed, config key, batch) alone, differs between ranks, and is drawn for the whole batch however it is split:
    nothing has to be saved.

    Args:
        severity: strength of each operation, above 0 and at most 10, which is 30 degrees, shear 0.3, 45 % of the side,
            4 bits, a factor of 0.1 or 1.9.
        depth: operations per image, at least 1.
        mean: that was subtracted from images between 0 (black) and 1 (white): one number, or one per channel.
        std: that they were divided by after that, above 0.
        input_key: where the images (N, C, H, W) stand in a batch.

    Raises:
        ValueError: an argument is out of range; at FIT_START or at the first batch, inputs are no images, not of as
            many channels as `mean` and `std`, or not between 0 and 1 once these are taken back.

    Evidence:
        Strong for natural images with many epochs (Cubuk et al. 2020, arXiv:1909.13719), where severity and depth are
        tuned; none for few epochs.
    """

    def __init__(
        self,
        severity: float = 9.0,
        depth: int = 2,
        mean: PerChannel = 0.0,
        std: PerChannel = 1.0,
        input_key: Key = 0,
    ) -> None:
        super().__init__(severity, mean, std, input_key)
        check_whole("depth", depth, 1)
        self.depth = depth

    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        return rand_augment(images, self.severity / MAX_SEVERITY, self.depth, generator)
