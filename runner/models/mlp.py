"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from runner.failures.checks import check_counts, check_number, refuse_if


class MLP(nn.Module):
    """Linear layers with ReLU between them, and dropout if `dropout` is above 0.

    Args:
        in_features: size of one input after flattening.
        hidden: width of each hidden layer, from input to output; empty is a linear model.
        num_classes: C of the logits `(N, C)`.
        dropout: probability in [0, 1) with which a hidden unit is dropped in training.

    Raises:
        ValueError: a width is below 1, or the probability is out of range.
    """

    def __init__(self, in_features: int, hidden: Sequence[int], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_counts(in_features=in_features, num_classes=num_classes)
        refuse_if(any(width < 1 for width in hidden), "hidden", list(hidden), "each width must be at least 1")
        check_number("dropout", dropout, "[0, 1)", "a probability")
        widths = [in_features, *hidden]
        self.layers = nn.Sequential()
        for fan_in, fan_out in pairwise(widths):
            self.layers.extend([nn.Linear(fan_in, fan_out), nn.ReLU()])
            if dropout > 0.0:
                self.layers.append(nn.Dropout(dropout))
        self.layers.append(nn.Linear(widths[-1], num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits `(N, C)` of inputs `(N, ...)`."""
        return self.layers(inputs.flatten(start_dim=1))

    def flops_per_sample(self, shape: Sequence[int]) -> float:
        """Return the floating-point operations of the forward and backward pass for one sample: six per weight."""
        return 6.0 * sum(weight.numel() for weight in self.parameters() if weight.dim() == 2)
