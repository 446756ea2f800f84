"""Learning rates of optimizers and the keys under which they are logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def make_keys(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the key of each parameter group of each optimizer, such as 'lr-SGD/group0'."""
    counts: Counter[str] = Counter()
    keys = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        counts[name] += 1
        prefix = f"lr-{name}" if counts[name] == 1 else f"lr-{name}-{counts[name]}"
        keys += [f"{prefix}/group{index}" for index in range(len(optimizer.param_groups))]
    return keys


def copy_rates(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the learning rate of each parameter group of each optimizer, without waiting for a device.

    Rates that are tensors are copied, because schedulers change them in place.
    """
    return [
        rate if type(rate := group["lr"]) is float else _copy(rate)
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _copy(rate: Any) -> Any:
    return rate.detach().reshape(()).clone() if hasattr(rate, "detach") else float(rate)
