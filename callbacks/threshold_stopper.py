"""Stops training when a metric passes a threshold."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from runner.callbacks._metric_stopper import MetricStopper
from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")


class ThresholdStopper(MetricStopper):
    """Stops training when a metric has passed a threshold; a value equal to the threshold has not passed it.

    The metric is read after each evaluation inside training or, for training metrics, at each EPOCH_END. It is computed
    over all ranks, so that they stop together. The callback keeps no state: a resumed run stops at the same batch as an
    uninterrupted one, and stays stopped if the metric had already passed the threshold.

    Args:
        monitor: name of the metric; 'loss' is the mean loss of an evaluator.
        threshold: value that the metric has to pass, in the metric's unit.
        dataloader_label: label of the evaluator that has the metric, or 'train'.
        comp: 'gt' to stop above the threshold, 'lt' to stop below it; None means below for names with loss, error or
            perplexity and for metrics that declare it, and above otherwise.
        stop_on_batch: whether to check a training metric over the epoch so far after each batch too. Each check waits
            for the device and for the other ranks.

    Raises:
        ValueError: an argument is out of range, or, at FIT_START, the run has no such metric.
    """

    def __init__(
        self,
        monitor: str,
        threshold: float,
        dataloader_label: str = "eval",
        comp: str | None = None,
        stop_on_batch: bool = False,
    ) -> None:
        super().__init__(monitor, dataloader_label, comp)
        check_number("threshold", threshold, "(-inf, inf)")
        if stop_on_batch and dataloader_label != "train":
            raise wrong_argument(
                "stop_on_batch",
                stop_on_batch,
                "only metrics of training are known after each batch; give dataloader_label='train', or evaluate "
                "more often (eval_interval)",
            )
        self.threshold = threshold
        self.stop_on_batch = stop_on_batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self.stop_on_batch:
            return
        self._judge(state, self._metric_so_far(state))

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._metric.label == "train":
            self._judge(state, self._metric.read(state))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._metric.label != "train" and self._metric.is_fresh(state):
            self._judge(state, self._metric.read(state))

    def _check_resumed(self, state: State) -> None:
        if self._metric.is_fresh(state):
            self._judge(state, self._metric.read(state))
        elif state.timestamp.batch_in_epoch and self.stop_on_batch:
            self._judge(state, self._metric_so_far(state))

    def _judge(self, state: State, value: float | None) -> None:
        if value is None or state.stop_requested:
            return
        if value < self.threshold if self._lower else value > self.threshold:
            metric = f"{self._metric.label}/{self._metric.name}"
            log.info("stopped: %s is %.4g, past the threshold of %.4g", metric, value, self.threshold)
            state.stop_training()
