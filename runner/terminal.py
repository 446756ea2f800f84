"""What is printed for people: one kind of console, labelled lines, paths as they are best typed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STYLES = {"ok": "bold green", "warning": "bold yellow"}  # of labels, by their first word


def make_console(width: int = 120) -> Any:
    """Return a console as wide as the terminal, or where there is none, of `width` columns."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=width)


def print_block(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a title, where there is one, and labelled lines under it."""
    from rich.table import Table
    from rich.text import Text

    block = Table.grid(padding=(0, 2))
    for label, text in rows:
        style = STYLES.get(label.partition(" ")[0], "bold cyan")
        block.add_row(Text(label, style), Text(text, overflow="fold"))
    console = make_console()
    if title:
        console.print(Text(title, "bold"))
    console.print(block)


def show_path(path: Path) -> str:
    """Return a path as it is best typed: relative where it lies in the working directory."""
    path = path.absolute()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
