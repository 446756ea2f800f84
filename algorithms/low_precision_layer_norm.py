"""Low-precision layer norm: runs in the type that autocast computes in, rather than in 32 bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner.algorithms._low_precision import LowPrecisionNorm, in_low_precision, take_over


class _LowLayerNorm(nn.LayerNorm):
    """A layer norm that runs in autocast's type."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (..., D), in autocast's type where it is on."""

        def normalize(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return F.layer_norm(inputs, self.normalized_shape, weight, bias, self.eps)

        return in_low_precision(normalize, input, self.weight, self.bias)


class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Lets layer norms run in the type that autocast computes in, which reads and writes half as much memory.

    Weights stay in 32 bits, under the names they had, and the sums inside a norm are in 32 bits too. Without autocast
    nothing changes, which is said. There is nothing random, and nothing that depends on ranks or microbatches.

    Args:
        allow_no_match: leave a model without layer norms as it is, rather than refuse it.

    Raises:
        ValueError: at INIT, the model has no `LayerNorm` (a subclass may do something else, and does not count).

    Evidence:
        Some for speed on GPUs, where norms are bound by memory; none for the model that is trained, whose numbers are a
        little coarser (compare MosaicML Composer, "Low Precision LayerNorm").
    """

    kind = nn.LayerNorm

    @staticmethod
    def replace(norm: nn.LayerNorm, index: int) -> nn.Module:
        shape, has_bias = [*norm.normalized_shape], norm.bias is not None
        return take_over(_LowLayerNorm(shape, norm.eps, norm.elementwise_affine, has_bias), norm)
