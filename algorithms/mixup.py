"""MixUp: each sample is blended with another of its batch, and so are the targets."""

from __future__ import annotations

from torch import Tensor

from runner.algorithms._batch import Key
from runner.algorithms._mixing import Mixing, draw_weight, interpolate


class MixUp(Mixing):
    """Trains on blends of two samples and their targets, with one weight per batch and rank.

    A sample (x, y) with the partner (x', y') becomes ((1 - w) x + w x', (1 - w) y + w y'): the model is trained to be
    linear between samples (Zhang et al. 2018). The weight w is that of `draw_weight`.

    Partners come from this rank's whole batch, before it is split, so that microbatches give the same gradient. The
    draws depend only on (seed, config key, batch), so a resumed run repeats them without any saved state. The batch and
    its targets are not changed, and metrics see the true targets.

    Args:
        alpha: parameter of the distribution Beta(alpha, alpha), above 0; the larger it is, the stronger the blends.
        interpolate_loss: whether to blend two losses instead of the targets, for a loss that accepts only class
            indices; this computes the loss twice.
        input_key: index or name of the inputs in a batch, floating point (N, ...).
        target_key: index or name of the targets in a batch: class indices (N, ...) or probabilities (N, C, ...).

    Raises:
        ValueError: `alpha` is not above 0; or the algorithm is combined with CutMix, or `interpolate_loss` with
            LabelSmoothing.
        TypeError: during training, the inputs are not a floating-point tensor, or the outputs are not a tensor.

    Evidence:
        Strong for image classification with many epochs (Zhang et al. 2018, arXiv:1710.09412); none for a few epochs,
        in which it slows learning down.
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
