"""Torch's SGD and AdamW with a choice of which weights decay: all, or matrices only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

CHOICES = ("all", "matrices")


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay_on: str) -> list[dict[str, Any]]:
    """Return the parameters in groups: those that decay, and with a weight decay of 0 those that do not; none is empty.

    Args:
        parameters: the parameters of a model.
        weight_decay_on: 'all', or 'matrices': those of two or more dimensions. Norms and biases have one or none.

    Raises:
        ValueError: weight_decay_on is neither 'all' nor 'matrices'.
    """
    if weight_decay_on not in CHOICES:
        raise ValueError(f"weight_decay_on={weight_decay_on!r}: must be one of {', '.join(map(repr, CHOICES))}")
    parameters = list(parameters)
    if weight_decay_on == "all":
        return [{"params": parameters}]
    matrices = [one for one in parameters if one.ndim >= 2]
    others = [one for one in parameters if one.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class AdamW(torch.optim.AdamW):
    """Torch's AdamW.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", arXiv:1711.05101.

    Args:
        params: the parameters to optimize.
        lr: learning rate, at least 0.
        betas: decay of the means of gradients and of their squares, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled: each step takes `lr * weight_decay` of the weights.
        weight_decay_on: 'all', or 'matrices' to spare norms and biases, which are then the second group.
        fused: one kernel for all parameters; None: torch decides.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        weight_decay_on: str = "all",
        fused: bool | None = None,
    ) -> None:
        groups = decay_groups(params, weight_decay_on)
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)


class SGD(torch.optim.SGD):
    """Torch's stochastic gradient descent.

    Args:
        params: the parameters to optimize.
        lr: learning rate, at least 0.
        momentum: fraction of the last step that is kept, at least 0.
        weight_decay: L2 penalty, at least 0.
        nesterov: whether to use Nesterov momentum.
        weight_decay_on: 'all', or 'matrices' to spare norms and biases, which are then the second group.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        weight_decay_on: str = "all",
    ) -> None:
        groups = decay_groups(params, weight_decay_on)
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
