"""Shows the progress of training on the console: a bar for the current epoch, a line for each finished one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination, Record, TimeUnit
from runner.callbacks._epoch_line import FinishedEpoch, draw_line, label_epoch
from runner.callbacks._run_description import TRAIN_LOSS, describe_metrics
from runner.terminal import is_interactive, live_line

if TYPE_CHECKING:
    from runner import Logger, State

SHOWN = ("loss/", "metrics/")


class ProgressBar(LoggerDestination):
    """Shows training on the console of rank 0.

    On a terminal and in a notebook, one line is a bar with the mean loss of the epoch so far, batches per second and
    the time left in the run. A finished epoch becomes a plain line with its metrics, the only output elsewhere. Nothing
    is done per batch: a thread reads the state at intervals, and metrics arrive on the logger's thread.

    Args:
        refresh_interval: seconds between two updates of the bar.

    Raises:
        ValueError: `refresh_interval` is not above 0.
    """

    def __init__(self, refresh_interval: float = 0.25) -> None:
        if not refresh_interval > 0:
            raise ValueError(f"refresh_interval={refresh_interval!r}: must be a number of seconds above 0")
        self.refresh_interval = refresh_interval
        self._state: State
        self._logger: Logger | None = None  # while training
        self._console: Any
        self._live = ExitStack()  # the bar, on a terminal
        self._values: dict[str, float] = {}
        self._losses = (0, 0.0)  # the number of losses in this epoch, and their sum
        self._finished: deque[FinishedEpoch] = deque()
        self._epoch_began = (1, 0, 0.0)  # number from 1; batches and seconds trained before it
        self._fit_began = (0.0, 0.0)  # seconds on the clock, fraction of the run done
        self._paused = self._pause_began = 0.0  # seconds spent in evaluations; when the last began
        self._resumed_after: float | None = None  # seconds of the epoch trained before a resume

    def fit_start(self, state: State, logger: Logger) -> None:
        from rich.console import Console

        self._state = state
        self._logger = logger
        self._console = Console(highlight=False, soft_wrap=True, force_jupyter=False)
        self._fit_began = (time.perf_counter(), state.progress.elapsed_in(TimeUnit.DURATION))
        self.epoch_start(state, logger)
        if self._resumed_after is not None:
            number, batch, seconds = self._epoch_began
            self._epoch_began = (number, batch - state.timestamp.batch_in_epoch, seconds - self._resumed_after)
            self._resumed_after = None
        if is_interactive(self._console):
            self._live.enter_context(live_line(self._console, self._draw, 1 / self.refresh_interval))

    def epoch_start(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        self._epoch_began = (now.epoch + 1, now.batch, self._clock())

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._pause_began = time.perf_counter()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._paused += time.perf_counter() - self._pause_began

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._finish_epoch(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch_in_epoch:
            self._finish_epoch(state)
        logger.flush()  # the intended host-device sync, once per fit
        self._logger = None
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        self._print_finished()
        self._live.close()

    def state_dict(self) -> dict[str, Any]:
        if self._logger is None or not self._state.timestamp.batch_in_epoch:
            return {}
        self._logger.flush()  # the checkpoint includes everything logged before it
        shown = {key: value for key, value in self._values.items() if key.startswith(SHOWN)}
        return {"losses": list(self._losses), "values": shown, "seconds": self._clock() - self._epoch_began[2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._losses = tuple(state["losses"])
            self._values = state["values"]
            self._resumed_after = state["seconds"]

    def log_records(self, records: Sequence[Record]) -> None:
        for record in records:
            if self._finished:
                self._print_finished(before=record.step)
            self._values.update(record.metrics)
            if TRAIN_LOSS in record.metrics:
                count, total = self._losses
                self._losses = (count + 1, total + record.metrics[TRAIN_LOSS])

    def _finish_epoch(self, state: State) -> None:
        number, batch, seconds = self._epoch_began
        now = state.timestamp
        self._finished.append(
            FinishedEpoch(label_epoch(state, number), now.batch, now.batch - batch, self._clock() - seconds)
        )

    def _clock(self) -> float:
        """Return a clock reading in seconds that excludes evaluations."""
        return time.perf_counter() - self._paused

    def _print_finished(self, before: int | None = None) -> None:
        """Print finished epochs: all of them, or those whose metrics are complete because a later step has arrived."""
        while self._finished and (before is None or self._finished[0].last_step < before):
            epoch = self._finished.popleft()
            rate = f"{epoch.batches / epoch.seconds:.4g} ba/s"
            parts = [epoch.label, *describe_metrics(self._take_values()), rate, f"{epoch.seconds:.3g} s"]
            self._console.print("  |  ".join(parts), markup=False)

    def _take_values(self) -> dict[str, float]:
        values = self._values
        self._values = {}
        if self._losses[0]:
            values[TRAIN_LOSS] = self._losses[1] / self._losses[0]
        self._losses = (0, 0.0)
        return values

    def _draw(self) -> Any:
        """Return the line for the current epoch. Called on the thread that refreshes it."""
        state = self._state
        now = state.timestamp
        began, fraction_before = self._fit_began
        fraction = state.progress.elapsed_in(TimeUnit.DURATION)
        number, batch, seconds = self._epoch_began
        length = state.train_dataloader_len
        # Time already counts the epoch that has just ended while its evaluation runs.
        batches = now.batch_in_epoch if now.epoch < number else length or now.batch - batch
        texts = []
        count, total = self._losses
        if count:
            texts.append(f"loss {total / count:.4g}")
        if now.batch > batch:
            texts.append(f"{(now.batch - batch) / (self._clock() - seconds):.4g} ba/s")
        if fraction > fraction_before:
            left = (time.perf_counter() - began) * max(0.0, 1 - fraction) / (fraction - fraction_before)
            texts.append(f"{timedelta(seconds=int(left))} left")
        return draw_line(label_epoch(state, number), batches, length, fraction, texts)
