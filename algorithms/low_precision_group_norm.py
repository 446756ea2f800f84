"""Low-precision group norm: runs in the type that autocast computes in, rather than in 32 bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner.algorithms._low_precision import LowPrecisionNorm, in_low_precision, take_over


class _LowGroupNorm(nn.GroupNorm):
    """A group norm that runs in autocast's type."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input (N, C, ...), in autocast's type where it is on."""

        def normalize(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
            return F.group_norm(inputs, self.num_groups, weight, bias, self.eps)

        return in_low_precision(normalize, input, self.weight, self.bias)


class LowPrecisionGroupNorm(LowPrecisionNorm):
    """Lets group norms run in the type that autocast computes in, which reads and writes half as much memory.

    Weights stay in 32 bits, under the names they had, and the sums inside a norm are in 32 bits too. Without autocast
    nothing changes, which is said. There is nothing random, and nothing that depends on ranks or microbatches.

    Args:
        allow_no_match: leave a model without group norms as it is, rather than refuse it.

    Raises:
        ValueError: at INIT, the model has no `GroupNorm` (a subclass may do something else, and does not count).

    Evidence:
        Some for speed on GPUs, where norms are bound by memory; none for the model that is trained, whose numbers are a
        little coarser (compare MosaicML Composer, "Low Precision GroupNorm").
    """

    kind = nn.GroupNorm

    @staticmethod
    def replace(norm: nn.GroupNorm, index: int) -> nn.Module:
        return take_over(_LowGroupNorm(norm.num_groups, norm.num_channels, norm.eps, norm.affine), norm)
