"""Low-precision group norm: runs in autocast's dtype rather than in 32 bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner.algorithms._low_precision import LowPrecisionNorm, in_low_precision, take_over


class _LowGroupNorm(nn.GroupNorm):
    """A group norm that runs in autocast's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (N, C, ...), in autocast's dtype if autocast is on."""

        def normalize(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return F.group_norm(inputs, self.num_groups, weight, bias, self.eps)

        return in_low_precision(normalize, input, self.weight, self.bias)


class LowPrecisionGroupNorm(LowPrecisionNorm):
    """Runs group norms in autocast's dtype, which halves the memory that they read and write.

    Weights stay in 32 bits and keep their names, and the sums inside a norm are in 32 bits too. Without autocast
    nothing changes, and a warning says so. Nothing is random or depends on ranks or microbatches.

    Args:
        allow_no_match: whether to leave a model without group norms unchanged instead of raising an error.

    Raises:
        ValueError: at INIT, the model has no `GroupNorm`; subclasses do not count, because they may compute something
            else.

    Evidence:
        Some for speed on GPUs, where memory bandwidth limits norms; none for the trained model, whose numbers are a
        little less precise (compare MosaicML Composer, "Low Precision GroupNorm").
    """

    kind = nn.GroupNorm

    @staticmethod
    def replace(norm: nn.GroupNorm, index: int) -> nn.Module:
        return take_over(_LowGroupNorm(norm.num_groups, norm.num_channels, norm.eps, norm.affine), norm)
