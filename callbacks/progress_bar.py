"""Shows the progress of training: a line for each evaluation and epoch, and a bar for the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from runner import LoggerDestination, MetricRecord, TimeUnit
from runner.callbacks._epoch_loss import TRAIN_LOSS, EpochLoss
from runner.callbacks._progress_columns import (
    BATCH,
    ELAPSED,
    EPOCH,
    LEFT,
    RATE,
    ProgressColumn,
    fit_columns,
    join_cells,
    join_titles,
    progress_columns,
    show_part,
)
from runner.callbacks._remaining import batches_in_run, known_progress
from runner.failures.checks import check_numbers
from runner.terminal.console import epoch_number, make_console
from runner.terminal.live_line import is_interactive, live_line, repeated
from runner.terminal.text import show_clock, show_number

if TYPE_CHECKING:
    from runner import Logger, State

BAR = 30  # maximum width of the bar
BAR_AND_GAP = 14  # terminal columns kept free for a shorter one


class ProgressBar(LoggerDestination):
    """Prints a line for each evaluation and each epoch, and shows how far along the run is.

    The lines have columns under one header: the most important ones that fit into the terminal. The epoch loss is the
    mean of the training losses of the epoch's batches so far, and batches per second leave out evaluations. On a
    terminal and in a notebook, the next line is shown as it grows, with a bar for the whole run. Elsewhere, as in a
    pipe or with CI=true, it is printed when nothing else was printed for a while. Only rank 0 prints. It does no work
    per batch: a thread reads the state at intervals, and metrics arrive on the logger's thread.

    Args:
        refresh_interval: seconds between two updates of the bar.
        line_interval: seconds between progress lines if no bar is drawn.

    Raises:
        ValueError: an argument is not above 0.
    """

    def __init__(self, refresh_interval: float = 0.25, line_interval: float = 30.0) -> None:
        check_numbers("(0, inf]", "a number of seconds", refresh_interval=refresh_interval, line_interval=line_interval)
        self.refresh_interval = refresh_interval
        self.line_interval = line_interval
        self._state: State
        self._logger: Logger | None = None  # while training
        self._console: Any
        self._live = ExitStack()  # the live line, or the thread that prints progress
        self._columns: list[ProgressColumn] = []
        self._shown: list[ProgressColumn] = []  # the columns under the last header
        self._values: dict[str, float] = {}  # since the last line
        self._loss = EpochLoss()
        self._rows: deque[_Row] = deque()
        self._row_began = (-1, 0.0)  # batches trained at the last line, and the clock
        self._printed_at = 0.0
        self._fit_began = 0.0
        # Seconds and fraction of the run done at the last two lines: the first epoch may be slower than all others.
        self._marks: deque[tuple[float, float]] = deque(maxlen=2)
        self._paused = 0.0  # seconds spent in evaluations
        self._pause_began: float | None = None  # when the current evaluation began

    def fit_start(self, state: State, logger: Logger) -> None:
        now = time.perf_counter()
        self._state = state
        self._logger = logger
        self._console = make_console()
        self._columns = progress_columns(state)
        self._shown = []
        self._values = {}
        self._fit_began = now
        self._marks.clear()
        self._marks.append((now, self._fraction()))
        self._printed_at = now
        self._row_began = (state.timestamp.batch, self._clock())
        if is_interactive(self._console):
            self._live.enter_context(live_line(self._console, self._draw, self.refresh_interval))
        else:
            self._live.enter_context(repeated(self._print_if_silent, self.line_interval / 30))

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._pause_began = time.perf_counter()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._paused = time.perf_counter() - self._clock()
        self._pause_began = None
        if not self._rows or self._rows[-1].batch < state.timestamp.batch:  # else that line shows it
            self._add_row()

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        if self._row_began[0] < state.timestamp.batch:
            self._add_row()

    def fit_end(self, state: State, logger: Logger) -> None:
        self.epoch_checkpoint(state, logger)  # an interrupted epoch gets a line too
        logger.flush()  # the intended host-device sync, once per fit
        self._logger = None
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        self._live.close()
        while self._rows:
            self._print_row()

    def state_dict(self) -> dict[str, Any]:
        if self._logger is None:
            return {}
        self._logger.flush()  # the checkpoint includes everything logged before it
        return {"loss": self._loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self._loss.load_state_dict(state["loss"])

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            while self._rows and self._rows[0].batch < record.step:  # its metrics are complete
                self._print_row()
            self._values.update(record.metrics)
            self._loss.add(record)

    def _add_row(self) -> None:
        """Keep the progress of the run for a line that is printed when its metrics have arrived."""
        batch = self._state.timestamp.batch
        self._rows.append(_Row(batch, self._cells()))
        self._row_began = (batch, self._clock())
        self._printed_at = time.perf_counter()  # it is printed soon, so no progress line is needed
        self._marks.append((self._printed_at, self._fraction()))

    def _print_row(self) -> None:
        row = self._rows.popleft()
        values = {**self._values, **self._epoch_loss()}
        self._values = {}
        # A metric of several elements does not fit into a line.
        self._columns = [column for column in self._columns if not _has_parts(column.key, values)]
        metrics = {column.key: show_number(values[column.key]) for column in self._columns if column.key in values}
        self._print({**row.cells, **metrics})

    def _print(self, cells: Mapping[str, str], note: str = "") -> None:
        columns = self._fitting_columns()
        if columns != self._shown:
            self._shown = columns
            self._console.print(join_titles(columns), style="bold", soft_wrap=True)
        self._console.print(join_cells(columns, cells) + note, soft_wrap=True)
        self._printed_at = time.perf_counter()

    def _print_if_silent(self) -> None:
        if time.perf_counter() - self._printed_at >= self.line_interval:
            cells, activity = self._live_cells()
            self._print(cells, activity and f"  {activity}")

    def _draw(self) -> Any:
        """Return the next line so far, with a bar. The thread that refreshes the line calls this."""
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        columns = self._fitting_columns()
        cells, activity = self._live_cells()
        line = join_cells(columns, cells).ljust(sum(column.width + 2 for column in columns))
        free = max(1, self._console.width - len(line) - 1)
        grid = Table.grid()
        if columns != self._shown:
            grid.add_row(join_titles(columns))
        bar = Bar(total=1.0, completed=self._fraction(), width=min(BAR, free))
        grid.add_row(line, activity[:free] or bar)
        return grid

    def _live_cells(self) -> tuple[dict[str, str], str]:
        """Return the cells of the next line so far, and the progress of the current evaluation, '' in training."""
        state = self._state
        label = state.dataloader_label
        metrics = {key: show_number(value) for key, value in self._epoch_loss().items()}
        cells = {**self._cells(), **metrics}
        if label in (None, "train"):
            return cells, ""
        return cells, f"{label} {show_part(state.eval_timestamp.batch, state.dataloader_len)}"

    def _cells(self) -> dict[str, str]:
        """Return the cells for the progress, the time and the speed of the run."""
        state = self._state
        now = state.timestamp
        end = state.max_duration
        epochs = int(end.value) if end.unit is TimeUnit.EPOCH else None
        batches = None if end.unit is TimeUnit.SECOND else batches_in_run(state)
        cells = {
            EPOCH: show_part(epoch_number(now), epochs),
            BATCH: show_part(now.batch, batches),
            ELAPSED: show_clock(time.perf_counter() - self._fit_began),
        }
        batch, clock = self._row_began
        if now.batch > batch:
            rate = (now.batch - batch) / (self._clock() - clock)
            cells[RATE] = f"{rate:.{1 if rate >= 10 else 2}f}"
        began, first_fraction = self._marks[0]
        fraction = self._fraction()
        if fraction > first_fraction:
            left = (time.perf_counter() - began) * (1 - fraction) / (fraction - first_fraction)
            cells[LEFT] = show_clock(left)
        return cells

    def _epoch_loss(self) -> dict[str, float]:
        mean = self._loss.mean
        return {} if mean is None else {TRAIN_LOSS: mean}

    def _fitting_columns(self) -> list[ProgressColumn]:
        free = BAR_AND_GAP if is_interactive(self._console) else 0
        return fit_columns(self._columns, self._console.width - free)

    def _fraction(self) -> float:
        """Return the fraction of the run that is done."""
        return min(1.0, known_progress(self._state).elapsed_in(TimeUnit.DURATION))

    def _clock(self) -> float:
        """Return a clock reading in seconds that pauses during evaluations."""
        now = time.perf_counter() if self._pause_began is None else self._pause_began
        return now - self._paused


class _Row(NamedTuple):
    """A line to print once its metrics have arrived."""

    batch: int
    cells: dict[str, str]


def _has_parts(key: str, values: Mapping[str, float]) -> bool:
    return key not in values and any(name.startswith(f"{key}/") for name in values)
