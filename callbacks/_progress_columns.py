"""The columns that show the progress of a run, chosen by what it measures; on a narrow terminal the most important."""

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
    """A column of the table that grows during a run.

    Where not all fit, columns with lower numbers of importance are kept longer.
    """

    key: str
    title: str
    width: int
    importance: int = 0


def fit_columns(columns: Sequence[ProgressColumn], width: int) -> list[ProgressColumn]:
    """Return the columns that fit side by side, in their own order; the most important one is always there."""
    kept: set[str] = set()
    used = -len(_GAP)
    for column in sorted(columns, key=lambda one: one.importance):
        needed = len(_GAP) + column.width
        if not kept or used + needed <= width:
            kept.add(column.key)
            used += needed
    return [one for one in columns if one.key in kept]


def join_cells(columns: Sequence[ProgressColumn], cells: Mapping[str, str]) -> str:
    """Return one line of a table: the cells of the columns, without blanks at its end."""
    return _GAP.join(cells.get(one.key, "").rjust(one.width) for one in columns).rstrip()


def join_titles(columns: Sequence[ProgressColumn]) -> str:
    """Return the header of a table."""
    return join_cells(columns, {one.key: one.title for one in columns})


def progress_columns(state: State) -> list[ProgressColumn]:
    """Return the columns of a run, from left to right; those of metrics have the key under which they are logged."""
    from runner import Model  # imports torch, which a sweep's leader does without

    end = state.max_duration
    in_epochs = end.unit is TimeUnit.EPOCH
    epochs = len(show_part(0, int(end.value))) if in_epochs else 0
    batches = batches_in_run(state)
    first, *others = [one for one in state.evaluators if one.is_on] or [None]
    places = len(show_part(0, batches)) if batches else 13
    columns = [
        ProgressColumn(EPOCH, "epoch", max(len("epoch"), epochs), 0 if in_epochs else 5),
        ProgressColumn(BATCH, "batch", max(len("batch"), places), 5 if in_epochs else 0),
        _metric(TRAIN_LOSS, "epoch loss", 1),
        *_metrics("train", state.train_metrics, 6),
    ]
    has_loss = type(state.unwrapped_model).loss is not Model.loss
    for one in [first, *others]:
        if one is not None:
            if has_loss:
                columns.append(_metric(f"loss/{one.label}/total", f"{one.label} loss", 4 if one is first else 10))
            columns += _metrics(one.label, state.eval_metrics[one.label], 2 if one is first else 10)
    return [
        *columns,
        ProgressColumn(RATE, "batch/s", 7, 8),
        ProgressColumn(ELAPSED, "elapsed", 7, 7),
        ProgressColumn(LEFT, "left", 7, 3),
    ]


def show_part(done: int, total: int | None) -> str:
    """Return progress out of a total, such as ' 7/24', with constant width; a total of None is left out."""
    return f"{done:,}" if total is None else f"{done:{len(f'{total:,}')},}/{total:,}"


def _metrics(label: str, names: dict[str, object], importance: int) -> Iterator[ProgressColumn]:
    """Yield columns of metrics; all but the first are of little importance."""
    for number, name in enumerate(names):
        short = name.removeprefix("Multiclass").removeprefix("Binary")
        yield _metric(f"metrics/{label}/{name}", f"{label} {short}", importance if number == 0 else 9)


def _metric(key: str, title: str, importance: int) -> ProgressColumn:
    return ProgressColumn(key, title, max(NUMBER_WIDTH, len(title)), importance)
