"""Estimates a run's remaining time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from runner import Callback, TimeUnit
from runner.callbacks._clock import SAMPLING, seconds_in, wait_and_read_clock
from runner.callbacks._remaining import TINY, batches_in_run, known_progress
from runner.failures.checks import check_whole
from runner.timing.time import Interval, Progress

if TYPE_CHECKING:
    from runner import Evaluator, Logger, State


class RuntimeEstimator(Callback):
    """Logs an estimate of the time left for training and evaluations.

    The estimate is logged at most every 50 ms. It assumes that training continues at the mean rate so far, including
    the time spent waiting for data and writing checkpoints, and that each evaluator takes its mean time so far;
    evaluators that have not run yet are left out. It waits for a GPU only when an evaluation begins or ends. Rank 0
    measures the time.

    Args:
        skip_batches: number of warm-up batches to leave out at the start of each fit, at least 0.
        time_unit: 'seconds', 'minutes', 'hours' or 'days'.

    Raises:
        ValueError: an argument is out of range.

    Logs:
        time/remaining_estimate: estimated time left, in `time_unit`; 0 at FIT_END. It starts at the first batch with a
            known rate, which is in the second epoch if max_duration is in epochs and the loader has no length.
    """

    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        check_whole("skip_batches", skip_batches, 0, "a number of batches")
        self.skip_batches = skip_batches
        self.time_unit = time_unit
        self._unit = seconds_in(time_unit)
        self._to_skip = 0
        self._batches = 0  # number of measured training batches
        self._seconds = 0.0  # time they took
        self._evaluations: dict[str, list[float]] = {}  # number and total seconds of evaluations, by label
        self._batch_began = self._evaluations_began = self._evaluator_began = 0.0
        self._next_log = 0.0
        self._last_estimate: float | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._to_skip = self.skip_batches
        self._batch_began = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.perf_counter()
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._batches += 1
            self._seconds += now - self._batch_began
        self._batch_began = now
        if now < self._next_log or not self._batches:
            return
        self._next_log = now + SAMPLING
        batches = batches_in_run(state)
        if batches is not None:
            training = max(0, batches - state.timestamp.batch) * self._seconds / self._batches
            self._log(training + self._evaluations_left(state, batches), logger)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._evaluations_began = wait_and_read_clock(state.device)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._evaluator_began = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        measured = self._evaluations.setdefault(state.dataloader_label or "", [0, 0.0])
        measured[0] += 1
        measured[1] += wait_and_read_clock(state.device) - self._evaluator_began

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._batch_began += time.perf_counter() - self._evaluations_began

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._last_estimate:
            self._log(0.0, logger)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches, "seconds": self._seconds, "evaluations": self._evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches = state["batches"]
        self._seconds = state["seconds"]
        self._evaluations = {label: list(measured) for label, measured in state["evaluations"].items()}

    def _log(self, seconds: float, logger: Logger) -> None:
        self._last_estimate = seconds / self._unit
        logger.log_uncopied({"time/remaining_estimate": self._last_estimate})

    def _evaluations_left(self, state: State, batches: int) -> float:
        seconds = 0.0
        for evaluator in state.evaluators:
            if evaluator.label in self._evaluations:
                runs, measured = self._evaluations[evaluator.label]
                seconds += runs_left(evaluator, state, batches) * measured / runs
        return seconds


def runs_left(evaluator: Evaluator, state: State, batches: int) -> int:
    """Return how many more times an evaluator will run after this BATCH_END, in a run of `batches` batches."""
    interval = evaluator.eval_interval
    if not isinstance(interval, Interval) or not interval.time.value:
        return 0
    period = interval.time.value
    unit = interval.time.unit
    counts_whole_epochs = unit is TimeUnit.EPOCH
    if unit is TimeUnit.DURATION:
        period *= state.max_duration.value
        unit = state.max_duration.unit
        counts_whole_epochs = unit is TimeUnit.EPOCH and not state.train_dataloader_len
    step = known_progress(state).elapsed_in(unit) / state.timestamp.batch
    end = step * batches
    last_before_end = step * (batches - 1)
    per_epoch = None if counts_whole_epochs else state.train_dataloader_len
    before = Progress(state.previous_timestamp, state.max_duration, per_epoch).elapsed_in(unit)
    if counts_whole_epochs:
        last_before_end = math.ceil(end - TINY) - 1
        end = math.floor(end + TINY)
        step = 1.0
    period = max(period, step)  # an evaluator runs at most once per step

    def runs(count: float) -> int:
        return math.floor(count / period + TINY)

    at_the_end = runs(end) == runs(last_before_end)
    # Evaluations that are due at this batch, or at the end of its epoch, come after BATCH_END.
    return runs(end) - runs(before) + at_the_end
