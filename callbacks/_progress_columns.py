"""The columns that show the progress of a run, chosen by what the run measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runner import TimeUnit
from runner.callbacks._columns import NUMBER_WIDTH, Column
from runner.callbacks._epoch_loss import TRAIN_LOSS
from runner.callbacks._remaining import batches_in_run

if TYPE_CHECKING:
    from runner import State

EPOCH, BATCH, RATE, ELAPSED, LEFT = "epoch", "batch", "batch/s", "elapsed", "left"


def progress_columns(state: State) -> list[Column]:
    """Return the columns of a run, from left to right; those of metrics have the key under which they are logged."""
    from runner import Model  # imports torch, which a sweep's leader does without

    end = state.max_duration
    in_epochs = end.unit is TimeUnit.EPOCH
    epochs = len(show_part(0, int(end.value))) if in_epochs else 0
    batches = batches_in_run(state)
    first, *others = [one for one in state.evaluators if one.is_on] or [None]
    columns = [
        Column(EPOCH, "epoch", max(len("epoch"), epochs), 0 if in_epochs else 5),
        Column(BATCH, "batch", max(len("batch"), len(show_part(0, batches)) if batches else 13), 5 if in_epochs else 0),
        _metric(TRAIN_LOSS, "train loss", 1),
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
        Column(RATE, "batch/s", 7, 8),
        Column(ELAPSED, "elapsed", 7, 7),
        Column(LEFT, "left", 7, 3),
    ]


def show_part(done: int, total: int | None) -> str:
    """Return how much is done of a total, such as ' 7/24', as wide at each time; a total that is None is left out."""
    return str(done) if total is None else f"{done:{len(str(total))}}/{total}"


def _metrics(label: str, names: dict[str, object], importance: int) -> Iterator[Column]:
    """Yield columns of metrics; all but the first are of little importance."""
    for number, name in enumerate(names):
        short = name.removeprefix("Multiclass").removeprefix("Binary")
        yield _metric(f"metrics/{label}/{name}", f"{label} {short}", importance if number == 0 else 9)


def _metric(key: str, title: str, importance: int) -> Column:
    return Column(key, title, max(NUMBER_WIDTH, len(title)), importance)
