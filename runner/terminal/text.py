"""Text for a terminal or a pipe: headings, paragraphs, tables and durations, without colors or blanks at line ends."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from runner.files.printable import printable

WIDEST = 100  # columns of running text: longer lines are hard to read
UNLIMITED = 10_000  # columns of a table in a pipe
LEAST = 20  # columns for the last cell of a row
LONGEST = 26  # characters of a cell that others are aligned with
NUMBER_WIDTH = 9  # characters of the widest text that `show_number` returns


def columns() -> int:
    """Return the width of the terminal, 80 in a pipe, or COLUMNS from the environment."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def table_width() -> int:
    """Return the width that a table may have: of the terminal or COLUMNS; in a pipe, tables are as wide as they are."""
    return columns() if sys.stdout.isatty() or "COLUMNS" in os.environ else UNLIMITED


def heading(text: str) -> str:
    """Return a heading: bold on a terminal, unless NO_COLOR is set."""
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return printable(text) if is_plain else f"\x1b[1m{printable(text)}\x1b[0m"


def print_to_stderr(text: object) -> None:
    """Print what a user is to know, in one line or several, with escapes visible."""
    print(printable(text, lines=True), file=sys.stderr, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formats records of logging with escapes visible."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, in one line or several."""
        return printable(super().format(record), lines=True)


def shortened(text: str, width: int) -> str:
    """Return text cut to a width, with an ellipsis at its end if something is missing."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


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


def show_seconds(seconds: float) -> str:
    """Return a duration in words, such as "4.2 s", "12 s", "4 min" or "2 h 10 min"; "?" where there is no such time."""
    if not 0 <= seconds < 1e9:
        return "?"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes < 60 * 48 else f"{minutes / 60 / 24:.1f} days"


class Column(NamedTuple):
    """A column of a table that is as wide as its longest line."""

    head: list[str]
    """Its name, in one line or several."""
    cells: list[str]
    is_number: bool = False

    @property
    def width(self) -> int:
        """Characters of its longest line."""
        return max(map(len, [*self.head, *self.cells]))


def draw_table(chosen: Sequence[Column]) -> list[str]:
    """Return the lines of a table of at least one column. Numbers are right-aligned; headers end on the same line."""
    depth = max(len(column.head) for column in chosen)
    tall = [Column([], [""] * (depth - len(one.head)) + one.head + one.cells, one.is_number) for one in chosen]
    lines = []
    for row in zip(*(column.cells for column in tall), strict=True):
        cells = [
            f"{cell:>{column.width}}" if column.is_number else f"{cell:<{column.width}}"
            for cell, column in zip(row, tall, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return [*map(heading, lines[:depth]), *lines[depth:]]


def in_columns(rows: Sequence[Sequence[str]], indent: int = 2) -> Iterator[str]:
    """Yield lines with the cells of rows in aligned columns; the last cell of a row is wrapped in its column."""
    width = min(columns(), WIDEST)
    rows = [[printable(cell) for cell in row] for row in rows]
    cells = [*zip(*rows, strict=True)][:-1]
    sizes = [max((len(cell) for cell in column if len(cell) <= LONGEST), default=0) for column in cells]
    column = indent + sum(sizes) + 2 * len(sizes)
    for *before, last in rows:
        head = " " * indent + "".join(f"{cell:<{size}}  " for cell, size in zip(before, sizes, strict=True))
        if len(head) > column:  # a long cell has the rest of the row on the next line
            yield head.rstrip()
            head = " " * column
        lines = textwrap.wrap(last, max(width - column, LEAST), break_on_hyphens=False) or [""]
        yield f"{head}{lines[0]}".rstrip()
        yield from (" " * column + line for line in lines[1:])


def paragraphs(text: str, indent: int = 0) -> Iterator[str]:
    """Yield the rewrapped lines of a docstring; lists keep their items, and indented blocks their lines."""
    width = min(columns(), WIDEST)
    blank = " " * indent
    for number, block in enumerate(re.split(r"\n\s*\n", text.strip("\n"))):
        if number:
            yield ""
        if block.startswith("    "):
            yield from (f"{blank}{printable(line)}" for line in block.splitlines())
            continue
        for item in re.split(r"\n(?=- )", block):
            hanging = blank + "  " * item.startswith("- ")
            words = printable(" ".join(item.split()))
            yield from textwrap.wrap(words, width, initial_indent=blank, subsequent_indent=hanging)
