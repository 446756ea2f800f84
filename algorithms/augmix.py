"""AugMix: each image is blended with a mixture of its own augmented versions."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from runner.algorithms._augmentation import MAX_SEVERITY, Augmentation, PerChannel
from runner.algorithms._batch import Key
from runner.algorithms._image_operations import CORE, apply_each
from runner.checks import check_whole

MAX_DEPTH = 3  # of chains whose depth is drawn


def augmix(
    images: Tensor, strength: float, depth: int, width: int, alpha: float, generator: numpy.random.Generator
) -> Tensor:
    """Return (1 - m) x + m sum_i w_i chain_i(x), with m ~ Beta(alpha, alpha) and w ~ Dirichlet(alpha) for each image.

    Args:
        images: x, (N, C, H, W), in [0, 1].
        strength: the largest of an operation's, each drawn evenly, in [0, 1].
        depth: operations in a chain; -1 draws 1, 2 or 3 for each.
        width: chains of each image, at least 1.
        alpha: above 0.
        generator: what all draws come from.

    Returns:
        (N, C, H, W), in [0, 1].
    """
    num_samples = len(images)
    shares = generator.dirichlet([alpha] * width, size=num_samples) * generator.beta(
        alpha, alpha, size=(num_samples, 1)
    )
    depths = numpy.full((num_samples, width), depth)
    if depth == -1:
        depths = generator.integers(1, MAX_DEPTH + 1, size=(num_samples, width))
    mixed = images
    for index in range(width):
        chain = images
        for step in range(depths[:, index].max()):
            chosen = generator.integers(len(CORE), size=num_samples)
            chosen = numpy.where(step < depths[:, index], chosen, -1)
            chain = apply_each(chain, CORE, chosen, generator.uniform(-strength, strength, size=num_samples))
        share = torch.from_numpy(shares[:, index]).to(images.device, images.dtype, non_blocking=True)
        mixed = mixed + share.view(-1, 1, 1, 1) * (chain - images)
    return mixed


class AugMix(Augmentation):
    """Trains on blends of each image with augmented versions of itself; targets stay as they are.

    The operations are autocontrast, equalize, posterize, solarize, rotate, and shear and translate in both directions:
    torch operations on the batch's device. The paper's second loss, on how far predictions for two such blends differ,
    is not part of it. What is drawn is a function of (seed, config key, batch) alone, differs between ranks, and is
    drawn for the whole batch however it is split: nothing has to be saved.

    Args:
        severity: the largest strength of an operation, above 0 and at most 10, which is 30 degrees, shear 0.3, 45 % of
            the side, 4 bits.
        depth: operations in a chain, at least 1; -1 draws 1, 2 or 3 for each.
        width: chains of each image, at least 1.
        alpha: of the distributions of the shares, above 0; the smaller, the more one version stands out.
        mean: that was subtracted from images between 0 (black) and 1 (white): one number, or one per channel.
        std: that they were divided by after that, above 0.
        input_key: where the images (N, C, H, W) stand in a batch.

    Raises:
        ValueError: an argument is out of range; at FIT_START or at the first batch, inputs are no images, not of as
            many channels as `mean` and `std`, or not between 0 and 1 once these are taken back.

    Evidence:
        Strong for robustness against corrupted images (Hendrycks et al. 2020, arXiv:1912.02781), with the second loss;
        some for accuracy.
    """

    def __init__(
        self,
        severity: float = 3.0,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        mean: PerChannel = 0.0,
        std: PerChannel = 1.0,
        input_key: Key = 0,
    ) -> None:
        super().__init__(severity, mean, std, input_key)
        if depth != -1:
            check_whole("depth", depth, 1)
        check_whole("width", width, 1)
        if not alpha > 0:
            raise ValueError(f"alpha={alpha!r}: must be a number above 0")
        self.depth = depth
        self.width = width
        self.alpha = alpha

    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        return augmix(images, self.severity / MAX_SEVERITY, self.depth, self.width, self.alpha, generator)
