"""AugMix: each image is blended with a mixture of its own augmented versions."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from runner.algorithms._augmentation import MAX_SEVERITY, Augmentation, PerChannel
from runner.algorithms._batch import Key
from runner.algorithms._image_operations import CORE, apply_each
from runner.failures.checks import check_number, check_whole

MAX_DEPTH = 3  # largest number of operations in a chain whose depth is drawn


def augmix(
    images: Tensor, strength: float, depth: int, width: int, alpha: float, generator: numpy.random.Generator
) -> Tensor:
    """Return (1 - m) x + m sum_i w_i chain_i(x), with m ~ Beta(alpha, alpha) and w ~ Dirichlet(alpha) for each image.

    Args:
        images: images x, (N, C, H, W), in [0, 1].
        strength: largest strength of an operation, in [0, 1]; each strength is drawn uniformly up to it.
        depth: number of operations in a chain; -1 draws 1, 2 or 3 for each chain.
        width: number of chains for each image, at least 1.
        alpha: parameter of both distributions, above 0.
        generator: source of all random draws.
    """
    num_samples = len(images)
    shares = generator.dirichlet([alpha] * width, size=num_samples) * generator.beta(
        alpha, alpha, size=(num_samples, 1)
    )
    depths = numpy.full((num_samples, width), depth)
    if depth == -1:
        depths = generator.integers(1, MAX_DEPTH + 1, size=(num_samples, width))
    chosen = numpy.full((depths.max(), width, num_samples), -1)  # -1: the chain has ended
    strengths = numpy.zeros(chosen.shape)
    for index in range(width):
        for step in range(depths[:, index].max()):
            drawn = generator.integers(len(CORE), size=num_samples)
            chosen[step, index] = numpy.where(step < depths[:, index], drawn, -1)
            strengths[step, index] = generator.uniform(-strength, strength, size=num_samples)
    chains = images.repeat(width, 1, 1, 1)  # in one batch, because chains are independent
    for step in range(len(chosen)):
        chains = apply_each(chains, CORE, chosen[step].ravel(), strengths[step].ravel())
    mixed = images
    weights = torch.from_numpy(shares.T.copy()).to(images.device, images.dtype, non_blocking=True)
    for chain, weight in zip(chains.chunk(width), weights, strict=True):
        mixed = mixed + weight.view(-1, 1, 1, 1) * (chain - images)
    return mixed


class AugMix(Augmentation):
    """Trains on blends of each image with augmented versions of itself; targets stay unchanged.

    The operations are autocontrast, equalize, posterize, solarize, rotate, and shear and translate in both directions,
    all as torch operations on the batch's device. The paper's additional loss, on how far the predictions for two such
    blends differ, is not included. The draws depend only on (seed, config key, batch), differ between ranks, and are
    made for the whole batch before it is split into microbatches, so nothing has to be saved.

    Args:
        severity: largest strength of an operation, above 0 and at most 10; 10 means 30 degrees, shear 0.3, 45 % of the
            side, 4 bits.
        depth: number of operations in a chain, at least 1; -1 draws 1, 2 or 3 for each chain.
        width: number of chains for each image, at least 1.
        alpha: parameter of the distributions of the chains' shares, above 0; with a smaller value, one version
            dominates more.
        mean: mean that was subtracted from the images, which were in [0, 1] before; one number, or one per channel.
            None: that of the data, see the attribute `normalization` of the training loader.
        std: standard deviation that the images were then divided by, above 0; like `mean`.
        input_key: index or name of the images (N, C, H, W) in a batch.

    Raises:
        ValueError: an argument is out of range; or, at FIT_START or at the first batch, the inputs are not images, do
            not have the channels of `mean` and `std`, or are not in [0, 1] once the normalization is undone; or the
            normalization is unknown, or `mean` or `std` contradicts the data.

    Evidence:
        Strong for robustness against corrupted images (Hendrycks et al. 2020, arXiv:1912.02781), with the additional
        loss; some for accuracy.
    """

    def __init__(
        self,
        severity: float = 3.0,
        depth: int = -1,
        width: int = 3,
        alpha: float = 1.0,
        mean: PerChannel | None = None,
        std: PerChannel | None = None,
        input_key: Key = 0,
    ) -> None:
        super().__init__(severity, mean, std, input_key)
        if depth != -1:
            check_whole("depth", depth, 1)
        check_whole("width", width, 1)
        check_number("alpha", alpha, "(0, inf]")
        self.depth = depth
        self.width = width
        self.alpha = alpha

    def augment(self, images: Tensor, generator: numpy.random.Generator) -> Tensor:
        return augmix(images, self.severity / MAX_SEVERITY, self.depth, self.width, self.alpha, generator)
