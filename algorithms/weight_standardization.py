"""Weight standardization: the weights of each output channel have mean 0 and variance 1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import report
from runner.failures.checks import check_whole

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def standardize(weight: Tensor, epsilon: float = 1e-10) -> Tensor:
    """Return weights with mean 0 and variance 1 in each output channel.

    For each channel w, with its mean m and its variance v, this is (w - m) / sqrt(v + epsilon), the formula of layer
    norm. It is the same for a w + b with any a > 0 and b, so that the loss depends neither on the scale nor on the mean
    of a channel's weights (Qiao et al. 2019).

    Args:
        weight: floating-point weights (C_out, ...).
        epsilon: number added to the variance.
    """
    return F.layer_norm(weight, weight.shape[1:], eps=epsilon)


class _Standardized(nn.Module):
    """`standardize` as a parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return the standardized weight."""
        return standardize(weight)


class WeightStandardization(Algorithm):
    """Makes convolutions use standardized weights; the optimizer trains the weights before standardization.

    Meant for networks whose convolutions are followed by a norm, which absorbs the change of scale. Nothing is random
    or depends on ranks or microbatches. Evaluations use the standardized weights too.

    Args:
        n_last_layers_ignore: number of convolutions to leave unchanged, counted from the end; at least 0.
        allow_no_match: whether to leave a model without convolutions unchanged instead of raising an error.

    Raises:
        ValueError: `n_last_layers_ignore` is out of range; or, at INIT, the model has no convolutions before those.

    Evidence:
        Some, with group norm and small batches (Qiao et al. 2019, "Micro-Batch Training with Batch-Channel
        Normalization and Weight Standardization", arXiv:1903.10520); small with batch norm.
    """

    def __init__(self, n_last_layers_ignore: int = 0, allow_no_match: bool = False) -> None:
        check_whole("n_last_layers_ignore", n_last_layers_ignore, 0)
        self.n_last_layers_ignore = n_last_layers_ignore
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        modules = state.unwrapped_model.named_modules()
        convs = [(name, module) for name, module in modules if isinstance(module, CONVOLUTIONS)]
        convs = convs[: max(0, len(convs) - self.n_last_layers_ignore)]
        convs = [(name, conv) for name, conv in convs if conv.weight[0].numel() > 1]  # a single weight would become 0
        for _, conv in convs:
            parametrize.register_parametrization(conv, "weight", _Standardized())
        target = f"convolution before the last n_last_layers_ignore={self.n_last_layers_ignore}"
        report(self, state, [name for name, _ in convs], target, self.allow_no_match)
