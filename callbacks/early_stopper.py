"""Stops training when a metric has not improved for a while."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from runner import Time, TimeUnit
from runner.callbacks._metric_stopper import MetricStopper
from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

UNITS = (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN)


class EarlyStopper(MetricStopper):
    """Stops training when more than `patience` has passed since the metric was best.

    The metric is read after each evaluation inside training. A training metric is read at each EPOCH_END or, if the
    patience is in batches, samples or tokens, after each batch over the epoch so far, which waits for the device and
    for the other ranks. With the best value at epoch e and a patience of p epochs, the run has e + p + 1 epochs. A NaN
    is not an improvement. A run that stopped early stays stopped when it is resumed, unless its patience is increased.

    Args:
        monitor: name of the metric; 'loss' is the mean loss of an evaluator.
        dataloader_label: label of the evaluator that has the metric, or 'train'.
        comp: 'gt' if more is better, 'lt' if less is; None means less for names with loss, error or perplexity and for
            metrics that declare it, and more otherwise.
        min_delta: amount by which a value must improve on the best one to count as better, in the metric's unit.
        patience: how long to continue without an improvement, in epochs, batches, samples or tokens ('3ep').

    Raises:
        ValueError: an argument is out of range, or, at FIT_START, the run has no such metric.
    """

    def __init__(
        self,
        monitor: str,
        dataloader_label: str = "eval",
        comp: str | None = None,
        min_delta: float = 0.0,
        patience: str | int | Time = "1ep",
    ) -> None:
        super().__init__(monitor, dataloader_label, comp)
        check_number("min_delta", min_delta, "(-inf, inf)")
        self.min_delta = abs(min_delta)
        self.patience = Time.parse_or_epochs(patience, "patience")
        if self.patience.unit not in UNITS:
            raise wrong_argument("patience", str(self.patience), "must be in ep, ba, sp or tok, such as '3ep'")
        self._evaluated = False
        self._best: float | None = None
        # Counts in every unit, because a resumed run may have its patience in another unit.
        self._best_at = self._judged_at = dict.fromkeys(map(str, UNITS), 0)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._metric.label != "train" or self.patience.unit is TimeUnit.EPOCH:
            return
        self._judge(state, self._metric_so_far(state))

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._metric.label == "train" and self.patience.unit is TimeUnit.EPOCH:
            self._judge(state, self._metric.read(state))

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._evaluated = False

    def eval_end(self, state: State, logger: Logger) -> None:
        self._evaluated |= state.dataloader_label == self._metric.label

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._evaluated:
            self._judge(state, self._metric.read(state))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_at": self._best_at, "judged_at": self._judged_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best = state["best"]
        self._best_at = state["best_at"]
        self._judged_at = state["judged_at"]

    def _check_resumed(self, state: State) -> None:
        self._stop_if_out_of_patience(state)

    def _judge(self, state: State, value: float | None) -> None:
        self._judged_at = {str(unit): int(state.timestamp.count(unit)) for unit in UNITS}
        if value is not None and self._is_better(value):
            self._best = value
            self._best_at = self._judged_at
        else:
            self._stop_if_out_of_patience(state)

    def _stop_if_out_of_patience(self, state: State) -> None:
        unit = str(self.patience.unit)
        if self._judged_at[unit] - self._best_at[unit] <= self.patience.value:
            return
        metric = f"{self._metric.label}/{self._metric.name}"
        if self._best is None:
            log.info("stopped early: %s has been NaN so far", metric)
        else:
            reached = f"{self._best:.4g}, reached at {self._best_at[unit]}{unit}"
            remedy = f"to train on, raise patience={self.patience}"
            log.info("stopped early: %s has not improved on %s; %s", metric, reached, remedy)
        state.stop_training()

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return value == value  # not NaN
        gain = self._best - value if self._lower else value - self._best
        return gain > self.min_delta
