"""The base class of callbacks that stop training according to a metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from runner import Callback
from runner.failures.checks import check_one_of
from runner.training.metric_choice import MetricChoice, choose_metric

if TYPE_CHECKING:
    from runner import Logger, State


class MetricStopper(Callback, ABC):
    """Finds its metric at FIT_START, and checks whether a resumed run had already stopped."""

    def __init__(self, monitor: str, dataloader_label: str, comp: str | None) -> None:
        check_one_of("comp", comp, (None, "gt", "lt"))
        self.monitor = monitor
        self.dataloader_label = dataloader_label
        self.comp = comp
        self._metric = MetricChoice(dataloader_label, monitor)
        self._lower = comp == "lt"
        self._resumed = False

    def after_load(self, state: State, logger: Logger) -> None:
        self._resumed = state.resumed_from is not None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._metric = choose_metric(state, self.monitor, label=self.dataloader_label)
        self._lower = self.comp == "lt" if self.comp is not None else self._metric.lower_is_better(state)
        if self._resumed:
            self._check_resumed(state)
        self._resumed = False

    def _metric_so_far(self, state: State) -> float:
        """Return a training metric over the epoch so far. Call it on all ranks; it waits for all of them."""
        return float(state.train_metrics[self._metric.name].compute())

    @abstractmethod
    def _check_resumed(self, state: State) -> None:
        """Stop a resumed run that had already stopped."""
