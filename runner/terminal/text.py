"""Formats text for a terminal or a pipe: headings, paragraphs, tables and durations. No colors, no trailing spaces."""

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
LEAST = 20  # minimum width of the last cell of a row, in columns
LONGEST = 26  # characters; a longer cell does not widen its column
NUMBER_WIDTH = 9  # characters of the widest text that `show_number` returns


def columns() -> int:
    """Return the width of the terminal, 80 in a pipe, or COLUMNS from the environment."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def table_width() -> int:
    """Return the maximum width of a table: the width of the terminal or COLUMNS; in a pipe, there is no limit."""
    return columns() if sys.stdout.isatty() or "COLUMNS" in os.environ else UNLIMITED


def heading(text: str) -> str:
    """Return a heading: bold on a terminal, unless NO_COLOR is set."""
    is_plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return printable(text) if is_plain else f"\x1b[1m{printable(text)}\x1b[0m"


def print_to_stderr(text: object) -> None:
    """Print a message on stderr, in one line or several, with escape sequences made visible."""
    print(printable(text, lines=True), file=sys.stderr, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formats logging records with escape sequences made visible."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, in one line or several."""
        return printable(super().format(record), lines=True)


def shortened(text: str, width: int) -> str:
    """Return text cut to a width, with an ellipsis if anything was cut off."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def show_number(value: float) -> str:
    """Return a metric as text: with up to four decimals, such as '0.9000', or with an exponent, such as '1.23e-05'."""
    size = abs(value)
    if not math.isfinite(value) or value == 0 or 1e-3 <= size < 1e5:
        whole = len(str(int(size))) if math.isfinite(value) else 1
        return f"{value:.{min(4, 6 - whole)}f}"
    return f"{value:.2e}"


def show_clock(seconds: float) -> str:
    """Return a duration as text of at most seven characters: '9.3 s', '2:05', '1:02:05', '12h 05m', '6d 03h'."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}:{whole_seconds:02}"
    if hours < 10:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{hours}h {minutes:02}m" if hours < 100 else f"{hours // 24}d {hours % 24:02}h"


def show_seconds(seconds: float) -> str:
    """Return a duration as text, such as "4.2 s", "12 s", "4 min" or "2 h 10 min"; "?" if negative or too long."""
    if not 0 <= seconds < 1e9:
        return "?"
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes < 60 * 48 else f"{minutes / 60 / 24:.1f} days"


class Column(NamedTuple):
    """A column of a table, as wide as its longest line."""

    head: list[str]
    """The lines of its header."""
    cells: list[str]
    is_number: bool = False

    @property
    def width(self) -> int:
        """The number of characters of its longest line."""
        return max(map(len, [*self.head, *self.cells]))


def draw_table(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table of at least one column. Numbers are right-aligned; headers are bottom-aligned."""
    depth = max(len(column.head) for column in columns)
    aligned = []
    for column in columns:
        layout = f"{{:{'>' if column.is_number else '<'}{column.width}}}"
        aligned.append([layout.format(cell) for cell in [""] * (depth - len(column.head)) + column.head + column.cells])
    lines = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
    return [*map(heading, lines[:depth]), *lines[depth:]]


def in_columns(rows: Sequence[Sequence[str]], indent: int = 2) -> Iterator[str]:
    """Yield lines with the cells of rows in aligned columns. The last cell of a row is wrapped in its column."""
    width = min(columns(), WIDEST)
    rows = [[printable(cell) for cell in row] for row in rows]
    aligned = [*zip(*rows, strict=True)][:-1]
    widths = [max((len(cell) for cell in cells if len(cell) <= LONGEST), default=0) for cells in aligned]
    start = indent + sum(widths) + 2 * len(widths)  # where the last column starts
    for *cells, last in rows:
        head = " " * indent + "".join(f"{cell:<{size}}  " for cell, size in zip(cells, widths, strict=True))
        if len(head) > start:  # after a long cell, the last cell goes to the next line
            yield head.rstrip()
            head = " " * start
        lines = textwrap.wrap(last, max(width - start, LEAST), break_on_hyphens=False) or [""]
        yield f"{head}{lines[0]}".rstrip()
        yield from (" " * start + line for line in lines[1:])


def paragraphs(text: str, indent: int = 0) -> Iterator[str]:
    """Yield the lines of a docstring, rewrapped. A list item starts a new line; indented blocks stay as they are."""
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
