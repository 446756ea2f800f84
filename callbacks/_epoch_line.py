"""An epoch in a line of the console: while it is trained, and when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from runner import TimeUnit

if TYPE_CHECKING:
    from runner import State


class FinishedEpoch(NamedTuple):
    """An epoch that has ended, whose last metrics may still be on their way."""

    label: str
    last_step: int
    batches: int
    seconds: float


def label_epoch(state: State, number: int) -> str:
    """Return what an epoch is called, its number counted from 1: 'epoch  3/24'."""
    end = state.max_duration
    if end.unit is not TimeUnit.EPOCH:
        return f"epoch {number}"
    return f"epoch {number:{len(str(end.value))}}/{end.value}"


def draw_line(label: str, batches: int, length: int | None, fraction: float, texts: Sequence[str]) -> Any:
    """Return the line of the epoch in flight, with a bar.

    Args:
        label: what the epoch is called.
        batches: of it that are trained.
        length: how many it has; None where that is not known, and the bar is the whole run's.
        fraction: of the run that is trained.
        texts: what stands behind.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    bar = ProgressBar(total=length or 1.0, completed=batches if length else fraction, width=24)
    line = Table.grid(padding=(0, 2))
    line.add_row(label, bar, f"{batches}/{length}" if length else f"batch {batches}", *texts)
    return line
