"""One epoch as one line on the console, during training and after it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runner import TimeUnit

if TYPE_CHECKING:
    from runner import State


class FinishedEpoch(NamedTuple):
    """An epoch that has ended; its last metrics may not have arrived yet."""

    label: str
    last_step: int
    batches: int
    seconds: float


def label_epoch(state: State, number: int) -> str:
    """Return the label of an epoch, such as 'epoch  3/24', with `number` counted from 1."""
    end = state.max_duration
    if end.unit is not TimeUnit.EPOCH:
        return f"epoch {number}"
    return f"epoch {number:{len(str(end.value))}}/{end.value}"


def draw_line(label: str, batches: int, length: int | None, fraction: float, texts: Sequence[str]) -> Any:
    """Return the line for the current epoch, with a bar.

    Args:
        label: label of the epoch.
        batches: number of batches trained in this epoch.
        length: number of batches in the epoch; None if unknown, in which case the bar shows the whole run.
        fraction: fraction of the run that is done.
        texts: texts to show after the bar.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(total=length or 1.0, completed=batches if length else fraction, width=24)
    line = Table.grid(padding=(0, 2))
    line.add_row(label, bar, f"{batches}/{length}" if length else f"batch {batches}", *texts)
    return line
