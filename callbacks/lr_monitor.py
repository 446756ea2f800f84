"""Logs the learning rate of each batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from runner import Logger, State


class LRMonitor(Callback):
    """Logs the learning rate with which each batch was trained.

    The rate is read just before the optimizer steps and logged at BATCH_END, at the step of the batch that it trained.
    Rates that are tensors are logged without waiting for the device.

    Logs:
        lr-{OptimizerClass}/group{i}: learning rate of parameter group i, per batch. Further optimizers of the same
            class are numbered from 2, as in `lr-AdamW-2/group0`.
    """

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._rates: dict[str, Any] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        rates = [group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups]
        if len(rates) != len(self._keys):
            self._keys = make_keys(state.optimizers)
        named = zip(self._keys, rates, strict=True)
        self._rates = {key: rate if type(rate) is float else _keep(rate) for key, rate in named}

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_uncopied(self._rates)


def make_keys(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the key of each parameter group of each optimizer."""
    seen: Counter[str] = Counter()
    keys = []
    for optimizer in optimizers:
        name = type(optimizer).__name__
        seen[name] += 1
        prefix = f"lr-{name}" if seen[name] == 1 else f"lr-{name}-{seen[name]}"
        keys += [f"{prefix}/group{index}" for index in range(len(optimizer.param_groups))]
    return keys


def _keep(rate: Any) -> Any:
    # Copy tensors, because a scheduler changes them in place before BATCH_END.
    return rate.detach().reshape(()).clone() if hasattr(rate, "detach") else float(rate)
