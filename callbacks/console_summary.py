"""Prints a description of the run and, at the end, its results, in a few lines on the console."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination, MetricRecord, Time, Timestamp
from runner.callbacks._best_values import BestValues
from runner.callbacks._epoch_loss import TRAIN_LOSS, EpochLoss
from runner.callbacks._run_description import describe_events, describe_run
from runner.distributed.restarts import may_restart
from runner.failures.errors import SessionOver
from runner.failures.exits import is_expected_exit
from runner.failures.facts import facts_of, is_of_environment
from runner.files.printable import printable
from runner.terminal.commands import show_command
from runner.terminal.console import describe_time, epoch_number, make_console, print_block, print_title, show_path
from runner.terminal.text import Column, draw_table, show_clock, show_number
from runner.training.budget import Budget
from runner.training.metric_choice import name_metric

if TYPE_CHECKING:
    from runner import Logger, State

log = logging.getLogger("runner")

MAX_NOT_FINITE = 10
"""Number of consecutive batches without a finite training loss that leads to a warning."""

MAX_METRICS = 8
"""Number of metrics to print at the end; the log of the run has the others."""


class ConsoleSummary(LoggerDestination):
    """Prints, on rank 0, what is trained at FIT_START, and the results when the run closes.

    At the start, three lines: the run and its folder; the model and how it is trained; the data. At the end: the final
    value of each metric, the best of each evaluation, how long the run took, its folder, and the commands to evaluate
    it, to train it for longer and to view it or, if it failed or was killed, to resume it. The epoch loss is the mean
    of the training losses of the last epoch's batches. Values from before a resume are included.

    During training it warns when the loss has been NaN or infinite for 10 batches in a row.

    Args:
        events: whether to print at the start which algorithms and callbacks run at which event, as `runner explain`
            does in detail.
    """

    def __init__(self, events: bool = False) -> None:
        self.events = events
        self._final: dict[str, float] = {}
        self._best = BestValues()
        self._best_at: dict[str, Timestamp] = {}
        self._loss = EpochLoss()
        self._ignored: set[str] = set()  # keys that the summary leaves out
        self._not_finite = 0  # consecutive batches up to now whose loss is not finite
        self._not_finite_since = Timestamp()  # time of the first of them
        self._state: State | None = None
        self._logger: Logger | None = None
        self._seconds = 0.0  # of all calls of fit, up to the last epoch or evaluation that ended
        self._evaluating = 0.0  # seconds of evaluations in all calls
        self._began: float | None = None  # when this fit began, less the seconds of earlier ones

    def init(self, state: State, logger: Logger) -> None:
        self._logger = logger

    def fit_start(self, state: State, logger: Logger) -> None:
        self._began = time.perf_counter() - self._seconds
        if self._state is None:
            self._state = state
            print_title(state.run_name, state.run_dir)
            console = make_console()
            for line in describe_run(state, console.width):
                console.print(line, soft_wrap=True)
            if self.events:
                print_block("", describe_events(state, logger))

    def epoch_end(self, state: State, logger: Logger) -> None:
        assert self._began is not None
        self._seconds = time.perf_counter() - self._began

    def fit_end(self, state: State, logger: Logger) -> None:
        self._seconds = self._seconds_of(state)
        self._began = None

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._eval_began = time.perf_counter()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._began is not None:  # else it is a standalone evaluation
            now = time.perf_counter()
            self._evaluating += now - self._eval_began
            self._seconds = now - self._began

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            self._loss.add(record)
            for key, value in record.metrics.items():
                if key in self._ignored:
                    continue
                if key.startswith(("loss/", "metrics/")):
                    self._note(key, value, record.timestamp)
                else:
                    self._ignored.add(key)

    def close(self, state: State, logger: Logger) -> None:
        has_begun = state.error is None or state.timestamp.batch > 0
        if self._state is None or not has_begun:  # if the first batch reveals a wrong config, nothing is left behind
            return
        console = make_console()
        if state.error is None:
            from rich.text import Text

            for line in self._metric_lines(console.width):
                console.print(Text.from_ansi(line), soft_wrap=True)  # its heading is bold
        for line in _outcome(state, self._seconds_of(state), self._evaluating):
            console.print(line, soft_wrap=True)
        if state.error is not None and is_of_environment(state.error) and may_restart():
            return  # the command restarts and says so, or says how to continue
        console.print(f"run      {show_path(state.run_dir)}", soft_wrap=True)
        for callback in state.callbacks:
            if address := getattr(callback, "mirrored_at", None):
                console.print(f"mirror   {address}", soft_wrap=True)
        commands = dict(_commands(state, logger))
        if commands:
            console.print(f"to {', '.join(commands)}:", soft_wrap=True)
        for command in commands.values():
            console.print(command, soft_wrap=True)  # alone on its line, to be pasted

    def state_dict(self) -> dict[str, Any]:
        if self._logger is not None:
            self._logger.flush()  # the checkpoint includes everything logged before it
        return {
            "final": dict(self._final),
            "best": self._best.state_dict(),
            "best_at": {key: at.state_dict() for key, at in self._best_at.items()},
            "loss": self._loss.state_dict(),
            "seconds": self._seconds_of(self._state) if self._state is not None else self._seconds,
            "evaluating": self._evaluating,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._final = dict(state["final"])
        self._best.load_state_dict(state["best"])
        self._best_at = {key: Timestamp.from_state_dict(at) for key, at in state["best_at"].items()}
        self._loss.load_state_dict(state["loss"])
        self._seconds = state["seconds"]
        self._evaluating = state.get("evaluating", 0.0)

    def _note(self, key: str, value: float, timestamp: Timestamp) -> None:
        self._final[key] = value
        if key == TRAIN_LOSS:
            self._watch(value, timestamp)
        elif self._state is not None and self._best.add(key, value, self._state):
            self._best_at[key] = timestamp

    def _watch(self, loss: float, timestamp: Timestamp) -> None:
        if math.isfinite(loss):
            self._not_finite = 0
            return
        if not self._not_finite:
            self._not_finite_since = timestamp
        self._not_finite += 1
        if self._not_finite == MAX_NOT_FINITE:
            log.warning(
                "the training loss has been %s since epoch %d, batch %d: lower the learning rate, warm it up, or clip "
                "gradients (+algorithms=gradient_clipping), or look for nan in the data; +callbacks=nan_monitor ends "
                "such a run immediately",
                loss,
                epoch_number(self._not_finite_since),
                self._not_finite_since.batch,
            )

    def _seconds_of(self, state: State) -> float:
        """Return the seconds of training and evaluations, without drawing, saving and sending at the end.

        The clock of the timestamp lags on several ranks, and the last epoch or evaluation may have ended long ago.
        """
        return max(self._seconds, state.timestamp.total_wct + self._evaluating)

    def _metric_lines(self, width: int) -> Iterator[str]:
        """Yield the lines of a table of metrics: evaluations before training, and per-class values last."""
        from runner.distributed.ranks import get_data_parallel_size

        rows = []
        for key in sorted(
            self._final, key=lambda key: (key.count("/"), key not in self._best_at, key.startswith("loss/"))
        ):
            final = show_number(self._final[key])
            best = where = ""
            name = printable("/".join(filter(None, name_metric(key))))
            if (at := self._best_at.get(key)) is not None:
                best = show_number(self._best.values[key])
                where = f"batch {at.batch:,}" if at.batch_in_epoch else f"epoch {at.epoch}"
            elif key == TRAIN_LOSS and self._loss.mean is not None:
                name = "epoch loss"  # the log has the loss of each batch
                final = show_number(self._loss.mean)
                where = "epoch mean" if get_data_parallel_size() == 1 else "epoch mean, rank 0"
            rows.append((name, final, best, where))
        if not rows:
            return
        metric, finals, bests, places = (list(cells) for cells in zip(*rows[:MAX_METRICS], strict=True))
        columns = [Column(["metric"], metric), Column(["final"], finals, True)]
        columns += [Column(["best"], bests, True), Column(["at"], places)]
        while sum(column.width + 2 for column in columns) - 2 > width and len(columns) > 1:
            columns.pop()
        yield from draw_table(columns)
        if (more := len(rows) - MAX_METRICS) > 0:
            yield f"and {more} more, in the log of the run"


def _outcome(state: State, seconds: float, evaluating: float) -> Iterator[str]:
    """Yield how a run ended, how much it trained, and how fast; the rate excludes evaluations."""
    now = state.timestamp
    if state.error is not None:
        outcome = "killed" if is_expected_exit(state.error) else "failed"
        outcome = "diverged" if facts_of(state.error).divergence else outcome
        outcome = state.error.status.lower() if isinstance(state.error, SessionOver) else outcome
        yield f"{outcome:<8} {describe_time(now)}, {show_clock(seconds)}"
        return
    epochs = f"{now.epoch:,} epochs{' and a part, ' if now.batch_in_epoch else ', '}" if now.epoch > 1 else ""
    batches = f"{now.batch:,} batch{'es' * (now.batch != 1)}"
    count, unit = (now.token, "tokens") if now.token else (now.sample, "samples")
    yield f"trained  {epochs}{batches} in {show_clock(seconds)}"
    if (training := seconds - evaluating) > 0:
        without = f" in the {show_clock(training)} without evaluations" if evaluating else ""
        yield f"speed    {count / training:,.0f} {unit}/s{without}"


def _commands(state: State, logger: Logger) -> Iterator[tuple[str, str]]:
    """Yield the next steps that a run offers, each with its command."""
    path = show_path(state.run_dir)
    saved = any(getattr(callback, "latest", None) is not None for callback in state.callbacks)
    if state.error is not None:
        if state.config:
            yield "resume it" if saved else "start it again (no checkpoint was written)", show_command("resume", path)
        elif saved:
            yield "resume it", f"Trainer(..., resume_path={path!r})"
    elif state.config and saved:
        longer = f"trainer.max_duration={Time(2 * state.max_duration.value, state.max_duration.unit)}"
        if (budget := state.config.get("budget")) is not None:
            longer = f"budget={Budget.parse(budget).doubled}"
        yield "evaluate it", show_command("eval", path)
        if not state.stop_requested:  # otherwise a callback that stopped it would stop it again
            yield "train it for longer", show_command("resume", path, longer)
    for hooks in (*state.callbacks, *logger.destinations):
        if command := getattr(hooks, "ui_command", None):
            yield "compare it", command
