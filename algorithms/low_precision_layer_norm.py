"""Low-precision layer norm: runs in autocast's dtype rather than in 32 bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner.algorithms._low_precision import LowPrecisionNorm, in_low_precision, take_over


class _LowLayerNorm(nn.LayerNorm):
    """A layer norm that runs in autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (..., D), in autocast's dtype if autocast is on."""

        def normalize(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return F.layer_norm(inputs, self.normalized_shape, weight, bias, self.eps)

        return in_low_precision(normalize, input, self.weight, self.bias)


class LowPrecisionLayerNorm(LowPrecisionNorm):
    """Runs layer norms in autocast's dtype, which halves the memory that they read and write.

    Weights stay in 32 bits and keep their names, and the sums inside a norm are in 32 bits too. Without autocast
    nothing changes, and a warning says so. Nothing is random or depends on ranks or microbatches.

    Args:
        allow_no_match: whether to leave a model without layer norms unchanged instead of raising an error.

    Raises:
        ValueError: at INIT, the model has no `LayerNorm`; subclasses do not count, because they may compute something
            else.

    Evidence:
        Some for speed on GPUs, where memory bandwidth limits norms; none for the trained model, whose numbers are a
        little less precise (compare MosaicML Composer, "Low Precision LayerNorm").
    """

    kind = nn.LayerNorm

    @staticmethod
    def replace(norm: nn.LayerNorm, index: int) -> nn.Module:
        shape = [*norm.normalized_shape]
        has_bias = norm.bias is not None
        return take_over(_LowLayerNorm(shape, norm.eps, norm.elementwise_affine, has_bias), norm)
