"""RandAugment: several operations of equal strength for each image."""

from __future__ import annotations

import numpy
from torch import Tensor

from runner.algorithms._augmentation import MAX_SEVERITY, Augmentation, PerChannel
from runner.algorithms._batch import Key
from runner.algorithms._image_operations import ALL, apply_each
from runner.failures.checks import check_whole


def rand_augment(images: Tensor, strength: float, depth: int, generator: numpy.random.Generator) -> Tensor:
    """Return images after `depth` operations each, one after another, out of fourteen.

    Args:
        images: images (N, C, H, W), in [0, 1].
        strength: strength of all operations, in [0, 1]; for an operation with two directions, one of them is drawn.
        depth: number of operations, at least 0.
        generator: source of all random draws.
    """
    for _ in range(depth):
        chosen = generator.integers(len(ALL), size=len(images))
        images = apply_each(images, ALL, chosen, generator.choice([-strength, strength], size=len(images)))
    return images


class RandAugment(Augmentation):
    """Changes each training image by a few random operations of the same strength.

    The operations are those of TrivialAugment, as torch operations on the batch's device. The draws depend only on
    (seed, config key, batch), differ between ranks, and are made for the whole batch before it is split into
    microbatches, so nothing has to be saved.

    Args:
        severity: strength of each operation, above 0 and at most 10; 10 means 30 degrees, shear 0.3, 45 % of the side,
            4 bits, a factor of 0.1 or 1.9.
        depth: number of operations per image, at least 1.
        mean: mean that was subtracted from the images, which were in [0, 1] before; one number, or one per channel.
            None: that of the data, see the attribute `normalization` of the training loader.
        std: standard deviation that the images were then divided by, above 0; like `mean`.
        input_key: index or name of the images (N, C, H, W) in a batch.

    Raises:
        ValueError: an argument is out of range; or, at FIT_START or at the first batch, the inputs are not images, do
            not have the channels of `mean` and `std`, or are not in [0, 1] once the normalization is undone; or the
            normalization is unknown, or `mean` or `std` contradicts the data.

    Evidence:
        Strong for natural images with many epochs (Cubuk et al. 2020, arXiv:1909.13719), with tuned severity and depth;
        none for few epochs.
    """

    def __init__(
        self,
        severity: float = 9.0,
        depth: int = 2,
        mean: PerChannel | None = None,
        std: PerChannel | None = None,
        input_key: Key = 0,
    ) -> None:
        super().__init__(severity, mean, std, input_key)
        check_whole("depth", depth, 1)
        self.depth = depth

    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        return rand_augment(images, self.severity / MAX_SEVERITY, self.depth, generator)
