"""Torch's own schedulers, as objects or made by factories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from runner.failures.errors import wrong_argument


def torch_schedulers(source: Any, optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return a list with the given scheduler, or with one that a factory makes for each optimizer.

    Raises:
        TypeError: the source is neither, or the scheduler needs a metric to step.
        ValueError: the scheduler belongs to an optimizer that is not in this run.
    """
    if isinstance(source, LRScheduler):
        if not any(source.optimizer is optimizer for optimizer in optimizers):
            name = type(source).__name__
            remedy = (
                f"give that optimizer itself as `optimizers`, or a factory, `lambda optimizer: {name}(optimizer, ...)`"
            )
            raise ValueError(f"schedulers={name}: its optimizer is not one of this run; {remedy}")
        schedulers = [source]
    elif callable(source):
        schedulers = [source(optimizer) for optimizer in optimizers]
    else:
        raise wrong_argument(
            "schedulers",
            source,
            "must be a schedule of runner.optim.schedulers, a function `def schedule(timestamp)` that returns a "
            "multiplier, or a torch scheduler, or a factory of one, `lambda optimizer: StepLR(optimizer, 10)`",
            TypeError,
        )
    for scheduler in schedulers:
        if isinstance(scheduler, int | float):
            raise TypeError(
                f"schedulers={source!r} returned {scheduler!r}: name its first argument `timestamp` to make it a "
                "schedule"
            )
        if not hasattr(scheduler, "step"):
            raise TypeError(f"schedulers={source!r} returned a {type(scheduler).__name__}, which has no step()")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "schedulers=ReduceLROnPlateau: torch's class cannot see a run's metrics; use "
                "runner.algorithms.ReduceOnPlateau instead, or scheduler=reduce_on_plateau in a config"
            )
    return schedulers
