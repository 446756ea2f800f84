"""Prints what is about to be trained, and later the results, in a few lines on the console."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination, Record, Timestamp
from runner.callbacks._metric_table import Series, print_metrics
from runner.callbacks._run_description import TRAIN_LOSS, describe_events, describe_run
from runner.metric_choice import MetricChoice
from runner.terminal import describe_time, epoch_number, print_block, show_path

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

LOST = 10
"""Number of consecutive batches without a finite training loss that leads to a warning."""


class ConsoleSummary(LoggerDestination):
    """Prints, on rank 0, what is trained at FIT_START, and the results when the run closes.

    At the start: the model and its size, the data, the device, and what runs at which event in which order. At the end:
    the final and best value of each loss and metric, the run's folder and how to view the run or, if it failed or was
    stopped, how to resume it. Metrics from before a resume are included.

    During training it warns when the loss has been NaN or infinite for 10 batches in a row.
    """

    def __init__(self) -> None:
        self._series: dict[str, Series] = {}
        self._ignored: set[str] = set()  # keys that the summary leaves out
        self._lost = 0  # batches in a row whose loss was not finite
        self._lost_at = Timestamp()  # the first of them
        self._state: State | None = None
        self._logger: Logger | None = None

    def init(self, state: State, logger: Logger) -> None:
        self._logger = logger

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._state is None:
            self._state = state
            print_block(state.run_name, [*describe_run(state), *describe_events(state, logger)])

    def log_records(self, records: Sequence[Record]) -> None:
        for record in records:
            for key, value in record.metrics.items():
                if key in self._ignored:
                    continue
                if key.startswith(("loss/", "metrics/")):
                    self._note(key, value, record.timestamp)
                    if key == TRAIN_LOSS:
                        self._watch(value, record.timestamp)
                else:
                    self._ignored.add(key)

    def close(self, state: State, logger: Logger) -> None:
        has_begun = state.error is None or state.timestamp.batch > 0
        if self._state is None or not has_begun:  # a run that its first batch refuses leaves nothing to look at
            return
        rows = [("run", show_path(state.run_dir))]
        if state.error is None:
            print_metrics(self._series)
        else:
            rows.insert(0, (_outcome(state.error), describe_time(state.timestamp)))
            rows.append(("resume", _resume_command(state)))
        commands = (getattr(one, "ui_command", None) for one in (*state.callbacks, *logger.destinations))
        rows += [("compare", command) for command in commands if command]
        print_block("", rows)

    def state_dict(self) -> dict[str, Any]:
        if self._logger is not None:
            self._logger.flush()  # the checkpoint includes everything logged before it
        return {
            key: [one.lower_is_better, one.final, one.best, one.best_at.state_dict()]
            for key, one in self._series.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._series = {
            key: Series(lower, final, best, Timestamp.from_state_dict(at))
            for key, (lower, final, best, at) in state.items()
        }

    def _note(self, key: str, value: float, timestamp: Timestamp) -> None:
        series = self._series.get(key)
        if series is None:
            lower = key.startswith("loss/")
            if self._state is not None and not lower:
                lower = _choice(key).lower_is_better(self._state)
            self._series[key] = Series(lower, value, value, timestamp)
            return
        series.final = value
        if value < series.best if series.lower_is_better else value > series.best:
            series.best = value
            series.best_at = timestamp

    def _watch(self, loss: float, timestamp: Timestamp) -> None:
        if math.isfinite(loss):
            self._lost = 0
            return
        if not self._lost:
            self._lost_at = timestamp
        self._lost += 1
        if self._lost == LOST:
            log.warning(
                "the training loss is %s since epoch %d, batch %d: lower the learning rate, warm it up, or clip "
                "gradients (+algorithms=gradient_clipping); +callbacks=nan_monitor ends such a run at once",
                loss,
                epoch_number(self._lost_at),
                self._lost_at.batch,
            )


def _choice(key: str) -> MetricChoice:
    _, label, name = key.split("/", 2)
    return MetricChoice(label, name)


def _resume_command(state: State) -> str:
    path = show_path(state.run_dir)
    saved = any(getattr(one, "latest", None) is not None for one in state.callbacks)
    if state.config:
        return f"python -m runner resume={path}" + ("" if saved else "  (from the start: no checkpoint was written)")
    return f"Trainer(..., resume_path={path!r})" if saved else "not possible: no checkpoint was written"


def _outcome(error: BaseException) -> str:
    return "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
