"""A residual block that is left out now and then, and what decides when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

METHODS = ("block", "sample")
DISTRIBUTIONS = ("linear", "uniform")


def drop_rates(count: int, drop_rate: float, distribution: str) -> list[float]:
    """Return the probability with which each of `count` blocks is left out.

    Args:
        count: number of blocks, L.
        drop_rate: of the last block, in [0, 1].
        distribution: 'linear': drop_rate l / L for block l = 1 ... L; 'uniform': the same for all.
    """
    return [drop_rate * (index + 1) / count if distribution == "linear" else drop_rate for index in range(count)]


def draw_kept(rates: list[float], num_samples: int, seed: int) -> Tensor:
    """Return which blocks stay for which samples, (L, num_samples), bool, on the CPU; a function of the arguments."""
    chances = torch.rand(len(rates), num_samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return chances >= torch.tensor(rates, dtype=torch.float64)[:, None]


class StochasticBlock(nn.Module):
    """A block f of which training takes x or f(x), and evaluation the mean of what training takes.

    A block whose output has another shape than its input is never left out.

    Args:
        block: maps (N, ...) to (N, ...); it has its shortcut within itself.

    Attributes:
        rate: probability with which it is left out.
        kept: whether it stays, in training: for all samples, or for each of them (N,).
        keeps_shape: whether output and input have the same shape; None until it has run.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.rate = 0.0
        self.kept: bool | Tensor = True
        self.keeps_shape: bool | None = None

    # The choice is Python's, and the block itself compiled: else each set of blocks that stay would be a graph anew.
    @torch.compiler.disable(recursive=False)
    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the inputs (N, ...), the block's output, or their mean, weighed by the rate."""
        if self.training and self.kept is False and self.keeps_shape:
            # The weights get a gradient of 0, not none: DDP waits for each of them, and all ranks do the same.
            return inputs + 0 * sum(one.sum() for one in self.block.parameters() if one.requires_grad)
        outputs = self.block(inputs, *args, **kwargs)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"{type(self.block).__name__} returns a {type(outputs).__name__}: it must return a tensor")
        self.keeps_shape = outputs.shape == inputs.shape
        if not self.keeps_shape:
            return outputs
        if not self.training:
            return inputs + (outputs - inputs) * (1 - self.rate) if self.rate else outputs
        if isinstance(self.kept, Tensor):
            return torch.where(self.kept.view(-1, *[1] * (outputs.ndim - 1)), outputs, inputs)
        return outputs
