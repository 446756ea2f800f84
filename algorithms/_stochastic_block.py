"""A residual block that training skips at random, and the random draws for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.sharding import is_sharded

METHODS = ("block", "sample")
DISTRIBUTIONS = ("linear", "uniform")


def drop_rates(count: int, drop_rate: float, distribution: str) -> list[float]:
    """Return the probability of skipping each of `count` blocks.

    Args:
        count: number of blocks, L.
        drop_rate: probability of skipping the last block, in [0, 1].
        distribution: 'linear' for drop_rate * l / L at block l = 1 ... L, 'uniform' for the same probability at all
            blocks.
    """
    return [drop_rate * (index + 1) / count if distribution == "linear" else drop_rate for index in range(count)]


def draw_kept(rates: list[float], num_samples: int, seed: int) -> Tensor:
    """Return which blocks to keep for which samples: (L, num_samples), bool, on the CPU."""
    chances = torch.rand(len(rates), num_samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return chances >= torch.tensor(rates, dtype=torch.float64)[:, None]


class StochasticBlock(nn.Module):
    """A block f that returns x or f(x) in training, and their expected value in evaluation.

    If training returns x with probability r, the expected value is r x + (1 - r) f(x) = x + (1 - r) (f(x) - x): a
    residual branch g(x) = f(x) - x is scaled by the probability that training keeps it (Huang et al. 2016). A block
    whose output has a different shape than its input is never skipped.

    Args:
        block: module that maps (N, ...) to (N, ...), including its shortcut.

    Attributes:
        rate: probability of skipping the block.
        kept: whether training keeps the block: one bool for all samples, or one for each of them (N,).
        keeps_shape: whether the output has the shape of the input; None until the block has run.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.rate = 0.0
        self.kept: bool | Tensor = True
        self.keeps_shape: bool | None = None

    # Only the block itself is compiled: with the choice in the graph, each set of kept blocks would be recompiled.
    @torch.compiler.disable(recursive=False)
    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the inputs (N, ...), the block's output, or their mean weighted by the rate."""
        if self.training and self.kept is False and self.keeps_shape:
            # The weights get gradients of 0 rather than None, because DDP waits for each of them on every rank.
            weights: list[Any] = [weight for weight in self.block.parameters() if weight.requires_grad]
            return inputs + 0 * sum((weight.to_local() if is_sharded(weight) else weight).sum() for weight in weights)
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
