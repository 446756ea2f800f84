"""The learning rate of each batch, as it was used."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from runner import Callback

if TYPE_CHECKING:
    from runner import Logger, State


class LRMonitor(Callback):
    """Logs the learning rate with which each batch was trained.

    It is read just before the optimizer steps and logged at BATCH_END, at the step of the batch that it trained. Rates
    that are tensors are logged without reading them back.

    Logs:
        lr-{OptimizerClass}/group{i}: the rate of parameter group i. A second optimizer of one class is numbered, from
            2 on: `lr-AdamW-2/group0`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rates: dict[str, Any] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        seen: Counter[str] = Counter()
        self._names = []
        for optimizer in state.optimizers:
            name = type(optimizer).__name__
            seen[name] += 1
            self._names.append(f"lr-{name}" if seen[name] == 1 else f"lr-{name}-{seen[name]}")

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self._rates = {}
        for name, optimizer in zip(self._names, state.optimizers, strict=True):
            for index, group in enumerate(optimizer.param_groups):
                rate = group["lr"]
                # A scheduler fills a tensor in place before BATCH_END.
                self._rates[f"{name}/group{index}"] = rate if isinstance(rate, float | int) else rate.clone()

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics(self._rates)
