"""Logs the learning rate of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner import Callback
from runner.callbacks._rates import copy_rates, make_keys

if TYPE_CHECKING:
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
        rates = copy_rates(state.optimizers)
        if len(rates) != len(self._keys):
            self._keys = make_keys(state.optimizers)
        self._rates = dict(zip(self._keys, rates, strict=True))

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_uncopied(self._rates)
