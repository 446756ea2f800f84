"""MixUp: each sample is blended with another of its batch, and so are their targets."""

from __future__ import annotations

import random

from torch import Tensor

from runner.algorithms._batch import Key
from runner.algorithms._mixing import Mixing, interpolate


def draw_weight(alpha: float, seed: int) -> float:
    """Return how much of the partner to blend in.

    Args:
        alpha: of the Beta distribution, above 0.
        seed: the draw depends on nothing else.

    Returns:
        lambda = min(b, 1 - b) in [0, 0.5] with b ~ Beta(alpha, alpha).
    """
    b = random.Random(seed).betavariate(alpha, alpha)
    return min(b, 1 - b)


class MixUp(Mixing):
    """Trains on blends of two samples and their targets, one lambda per batch and rank.

    Partners come from the whole batch of this rank, also when it is split, so that k microbatches give the gradient
    of one. What is drawn is a function of (seed, config key, batch) alone: nothing has to be saved for a resumed run
    to draw the same. Neither the batch nor its targets are changed; metrics see the true targets.

    Args:
        alpha: of Beta(alpha, alpha); the larger, the more is blended. Above 0.
        interpolate_loss: blend two losses instead of the targets, for a loss that accepts class numbers only; takes a
            second evaluation of the loss.
        input_key: where the inputs stand in a batch, floating point (N, ...).
        target_key: where the targets stand: class numbers (N, ...) or probabilities (N, C, ...).

    Raises:
        ValueError: `alpha` is not above 0; `interpolate_loss` together with LabelSmoothing; together with CutMix.
        TypeError: while training, inputs are no floating-point tensor, or outputs no tensor.

    Evidence:
        Strong for image classification with many epochs (Zhang et al. 2018, arXiv:1710.09412); none for a few epochs,
        where it slows training down.
    """

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: Key = 0, target_key: Key = 1
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)

    def draw(self, inputs: Tensor, seed: int) -> float:
        if not inputs.is_floating_point():
            raise TypeError(f"inputs of {inputs.dtype}: MixUp blends floating-point inputs only")
        return draw_weight(self.alpha, seed)

    def mix(self, inputs: Tensor, partners: Tensor) -> Tensor:
        return interpolate(inputs, partners, self._weight)
