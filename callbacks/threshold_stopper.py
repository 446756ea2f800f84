"""Stopping at a goal: training ends when a metric passes a threshold."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from runner.callbacks._metric_stopper import MetricStopper

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")


class ThresholdStopper(MetricStopper):
    """Stops training when a metric has passed a threshold; a value equal to it has not.

    The metric is read after each evaluation inside training, or at each EPOCH_END for metrics of training. It is over
    all ranks, so that they stop together. Nothing is kept from one value to the next: a resumed run stops where the
    whole one would have, and stays stopped where that has passed the threshold.

    Args:
        monitor: name of the metric; 'loss' is an evaluator's mean loss.
        threshold: to be passed, in the metric's unit.
        dataloader_label: whose metric: an evaluator's label, or 'train'.
        comp: 'gt' to stop above the threshold, 'lt' below it; None: below for names with loss, error or perplexity and
            for metrics that say so themselves, otherwise above.
        stop_on_batch: look at a metric of training after each batch too, as it is over the epoch so far. Each look
            waits for the device and for the other ranks.

    Raises:
        ValueError: an argument is out of range; at FIT_START, there is no such metric.
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
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise ValueError(f"threshold={threshold!r}: must be a finite number, in the metric's unit")
        if stop_on_batch and dataloader_label != "train":
            raise ValueError(
                f"stop_on_batch={stop_on_batch!r}: only metrics of training are known after each batch; "
                "give dataloader_label='train', or evaluate more often (eval_interval)"
            )
        self.threshold = threshold
        self.stop_on_batch = stop_on_batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.stop_on_batch:
            self._judge(state, self._metric_so_far(state))

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._metric.label == "train":
            self._judge(state, self._metric.read(state))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._metric.label != "train" and self._metric.is_fresh(state):
            self._judge(state, self._metric.read(state))

    def _ask_again(self, state: State) -> None:
        if self._metric.is_fresh(state):
            self._judge(state, self._metric.read(state))
        elif state.timestamp.batch_in_epoch and self.stop_on_batch:
            self._judge(state, self._metric_so_far(state))

    def _judge(self, state: State, value: float | None) -> None:
        if value is None or state.stop_requested:
            return
        if value < self.threshold if self._lower else value > self.threshold:
            shown = f"{self._metric.label}/{self._metric.name}"
            log.info("stopped: %s is %.4g, past the threshold of %.4g", shown, value, self.threshold)
            state.stop_training()
