"""A table of what each callback costs, inside and outside of training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner import Event

COLUMNS = ("callback", "event", "calls", "ms", "us per call", "us per step", "share of step", "share of run")
MAX_PRINTED = 12  # rows of each part

_EVENTS = [*Event]  # in the order in which they fire
IN_STEP = frozenset(_EVENTS[_EVENTS.index(Event.BEFORE_DATALOADER) : _EVENTS.index(Event.BATCH_CHECKPOINT) + 1])
"""The events of one training batch. An evaluation that follows is not part of the step."""


def make_rows(
    costs: Mapping[tuple[str, str], Sequence[int]], steps: int, rest_in_steps: int, rest_outside: int
) -> list[list[Any]]:
    """Return the rows of the table: first those inside steps, then those outside, costliest first in each part.

    Each part has a row 'everything else'. The shares of the step add up to 1, and so do those of the run. Cells that
    do not apply are None: outside steps, the per-step numbers and the number of calls of 'everything else'.

    Args:
        costs: number of calls and nanoseconds by (callback, event).
        steps: number of batches trained in that time.
        rest_in_steps: nanoseconds inside steps during which no callback ran.
        rest_outside: nanoseconds of fit, evaluation and prediction outside of steps during which no callback ran.
    """
    inside = {key: cost for key, cost in costs.items() if key[1] in IN_STEP}
    outside = {key: cost for key, cost in costs.items() if key[1] not in IN_STEP}
    inside["everything else", "in steps"] = (steps, rest_in_steps)
    outside["everything else", "outside of steps"] = (0, rest_outside)
    in_steps = sum(nanoseconds for _, nanoseconds in inside.values())
    total = in_steps + sum(nanoseconds for _, nanoseconds in outside.values())

    def row(key: tuple[str, str], calls: int, nanoseconds: int) -> list[Any]:
        milliseconds, microseconds = nanoseconds / 1e6, nanoseconds / 1e3
        call_cells = [calls, milliseconds, microseconds / calls] if calls else [None, milliseconds, None]
        step_cells = [microseconds / max(1, steps), nanoseconds / in_steps] if key in inside else [None, None]
        return [*key, *call_cells, *step_cells, nanoseconds / total]

    return [
        row(key, calls, nanoseconds)
        for part in (inside, outside)
        for key, (calls, nanoseconds) in sorted(part.items(), key=lambda item: -item[1][1])
        if nanoseconds
    ]


def print_rows(rows: Sequence[Sequence[Any]], steps: int) -> None:
    """Print the costliest rows of each part, and the share of the rest."""
    inside = [row for row in rows if row[6] is not None]
    outside = [row for row in rows if row[6] is None]
    if steps:
        title = f"a training step takes {sum(row[5] for row in inside):.1f} us (mean of {steps} steps):"
        _print_part(title, inside, (2, 4, 5, 6))
    if outside:
        title = f"everything outside of steps takes {sum(row[-1] for row in outside):.1%} of the run:"
        _print_part(title, outside, (2, 4, 3, 7))


def _print_part(title: str, rows: Sequence[Sequence[Any]], numbers: Sequence[int]) -> None:
    from rich.table import Table

    from runner.files.printable import printable
    from runner.terminal.console import Unpadded, make_console

    *_, share = numbers
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in (0, 1, *numbers):
        table.add_column(COLUMNS[column], justify="left" if column < 2 else "right")
    for row in rows[:MAX_PRINTED]:
        cells = ("" if row[index] is None else f"{row[index]:.1f}" for index in numbers[1:-1])
        table.add_row(printable(row[0]), printable(row[1]), str(row[2] or ""), *cells, f"{row[share]:.1%}")
    console = make_console()
    console.print(title)
    console.print(Unpadded(table))
    if len(rows) > MAX_PRINTED:
        share_of_others = sum(row[share] for row in rows[MAX_PRINTED:])
        console.print(f"{len(rows) - MAX_PRINTED} more rows ({share_of_others:.1%}) are in the logged table")
