"""The columns of the progress table. A narrow terminal gets only the most important ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from runner import TimeUnit
from runner.callbacks._epoch_loss import TRAIN_LOSS
from runner.callbacks._remaining import batches_in_run
from runner.terminal.text import NUMBER_WIDTH

if TYPE_CHECKING:
    from runner import State

EPOCH = "epoch"
BATCH = "batch"
RATE = "batch/s"
ELAPSED = "elapsed"
LEFT = "left"
_GAP = "  "


class ProgressColumn(NamedTuple):
    """A column of the progress table.

    If not all columns fit, those with the lowest `importance` numbers are shown.
    """

    key: str
    title: str
    width: int
    importance: int = 0


def fit_columns(columns: Sequence[ProgressColumn], width: int) -> list[ProgressColumn]:
    """Return the columns that fit side by side, in their original order, and at least the most important one."""
    fitting: set[str] = set()
    used = -len(_GAP)
    for column in sorted(columns, key=lambda column: column.importance):
        needed = len(_GAP) + column.width
        if not fitting or used + needed <= width:
            fitting.add(column.key)
            used += needed
    return [column for column in columns if column.key in fitting]


def join_cells(columns: Sequence[ProgressColumn], cells: Mapping[str, str]) -> str:
    """Return a line of the table, with a cell for each column and without trailing blanks."""
    return _GAP.join(cells.get(column.key, "").rjust(column.width) for column in columns).rstrip()


def join_titles(columns: Sequence[ProgressColumn]) -> str:
    """Return the header of the table."""
    return join_cells(columns, {column.key: column.title for column in columns})


def progress_columns(state: State) -> list[ProgressColumn]:
    """Return the columns of a run, from left to right. The key of a metric's column is its logging key."""
    from runner import Model  # imports torch, which the main process of a sweep does not need

    end = state.max_duration
    in_epochs = end.unit is TimeUnit.EPOCH
    batches = batches_in_run(state)
    epoch_width = len(show_part(0, int(end.value))) if in_epochs else 0
    batch_width = len(show_part(0, batches)) if batches else 13
    columns = [
        ProgressColumn(EPOCH, "epoch", max(len("epoch"), epoch_width), 0 if in_epochs else 5),
        ProgressColumn(BATCH, "batch", max(len("batch"), batch_width), 5 if in_epochs else 0),
        _metric(TRAIN_LOSS, "epoch loss", 1),
        *_metrics("train", state.train_metrics, 6),
    ]
    has_loss = type(state.unwrapped_model).loss is not Model.loss
    labels = [evaluator.label for evaluator in state.evaluators if evaluator.is_on]
    for number, label in enumerate(labels):
        if has_loss:
            columns.append(_metric(f"loss/{label}/total", f"{label} loss", 10 if number else 4))
        columns += _metrics(label, state.eval_metrics[label], 10 if number else 2)
    return [
        *columns,
        ProgressColumn(RATE, "batch/s", 7, 8),
        ProgressColumn(ELAPSED, "elapsed", 7, 7),
        ProgressColumn(LEFT, "left", 7, 3),
    ]


def show_part(done: int, total: int | None) -> str:
    """Return progress as text of constant width, such as ' 7/24'; without the total if it is None."""
    return f"{done:,}" if total is None else f"{done:{len(f'{total:,}')},}/{total:,}"


def _metrics(label: str, names: dict[str, object], importance: int) -> Iterator[ProgressColumn]:
    """Yield the columns of metrics. All but the first are unimportant."""
    for number, name in enumerate(names):
        short = name.removeprefix("Multiclass").removeprefix("Binary")
        yield _metric(f"metrics/{label}/{name}", f"{label} {short}", importance if number == 0 else 9)


def _metric(key: str, title: str, importance: int) -> ProgressColumn:
    return ProgressColumn(key, title, max(NUMBER_WIDTH, len(title)), importance)
