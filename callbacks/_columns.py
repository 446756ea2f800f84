"""Lines of text in columns of fixed width; where the terminal is narrow, the least important columns drop out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NUMBER_WIDTH = 9
"""The widest text that `show_number` returns."""

_GAP = "  "


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        key: the cells that it shows.
        title: its header.
        width: its width in characters, at least that of the title.
        importance: its rank when not all columns fit: lower stays longer.
        justify_left: whether its cells start at its left edge.
    """

    key: str
    title: str
    width: int
    importance: int = 0
    justify_left: bool = False


def fit_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit side by side, in their own order; the most important one is always there."""
    kept: set[str] = set()
    used = -len(_GAP)
    for column in sorted(columns, key=lambda one: one.importance):
        needed = len(_GAP) + column.width
        if not kept or used + needed <= width:
            kept.add(column.key)
            used += needed
    return [one for one in columns if one.key in kept]


def join_cells(columns: Sequence[Column], cells: Mapping[str, str]) -> str:
    """Return one line of a table: the cells of the columns, without blanks at its end."""
    texts = []
    for column in columns:
        cell = cells.get(column.key, "")
        texts.append(cell.ljust(column.width) if column.justify_left else cell.rjust(column.width))
    return _GAP.join(texts).rstrip()


def join_titles(columns: Sequence[Column]) -> str:
    """Return the header of a table."""
    return join_cells(columns, {one.key: one.title for one in columns})


def show_number(value: float) -> str:
    """Return a metric as text: four decimals where they fit in seven digits, such as '0.9000', else '1.23e-05'."""
    size = abs(value)
    if not math.isfinite(value) or value == 0 or 1e-3 <= size < 1e5:
        whole = len(str(int(size))) if math.isfinite(value) else 1
        return f"{value:.{min(4, 6 - whole)}f}"
    return f"{value:.2e}"


def show_clock(seconds: float) -> str:
    """Return a length of time as text of at most seven characters: '9.3 s', '2:05', '1:02:05', '12h 05m', '6d 03h'."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}:{rest:02}"
    if hours < 10:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{hours}h {minutes:02}m" if hours < 100 else f"{hours // 24}d {hours % 24:02}h"
