"""What each callback costs, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.terminal import make_console

COLUMNS = ("callback", "event", "calls", "ms", "us per call", "us per batch", "share")
MAX_PRINTED = 20  # rows


def make_rows(costs: Mapping[tuple[str, str], Sequence[int]], batches: int, rest: int) -> list[list[Any]]:
    """Return the rows of `COLUMNS`, the costliest first, with one for everything else; the shares add up to 1.

    Args:
        costs: calls and nanoseconds by callback and event.
        batches: that were trained meanwhile.
        rest: nanoseconds in which no callback ran.
    """
    costs = {**costs, ("everything else", ""): (batches, rest)}
    total = sum(spent for _, spent in costs.values())
    return [
        [*key, calls, spent / 1e6, *(spent / 1e3 / max(1, count) for count in (calls, batches)), spent / total]
        for key, (calls, spent) in sorted(costs.items(), key=lambda item: -item[1][1])
        if spent
    ]


def print_rows(rows: Sequence[Sequence[Any]]) -> None:
    """Print the costliest rows, and what the others cost together."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for owner, event, calls, *times, share in rows[:MAX_PRINTED]:
        table.add_row(owner, event, str(calls), *(f"{one:.1f}" for one in times), f"{share:.1%}")
    console = make_console()
    console.print(table)
    if len(rows) > MAX_PRINTED:
        others = sum(row[-1] for row in rows[MAX_PRINTED:])
        console.print(f"and {len(rows) - MAX_PRINTED} more with {others:.1%}, in the table that was logged")
