"""Prints titles, labeled lines and failures, and shows paths and positions as text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.failures.errors import RankFailed
from runner.failures.tracebacks import format_failure
from runner.files.addresses import without_credentials
from runner.files.printable import printable
from runner.terminal.output import texts_written
from runner.terminal.text import print_to_stderr

if TYPE_CHECKING:
    from runner.timing.time import Timestamp

STYLES = {"ok": "bold green", "warning": "bold yellow"}
"""Styles by the first word of a label."""

_announced: tuple[Path, int, int] | None = None
"""The run whose title was printed early: its folder, how many lines the title took, and `texts_written()` after it."""


def make_console(width: int = 120) -> Any:
    """Return a console as wide as the terminal; without a terminal, `width` columns wide, or COLUMNS if that is set."""
    from rich.console import Console

    class PrintableConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            shown = (printable(value, lines=True) if isinstance(value, str) else value for value in objects)
            super().print(*shown, **options)

    console = PrintableConsole(highlight=False, markup=False, force_jupyter=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = width
    return console


class Unpadded:
    """A Rich renderable, printed without trailing spaces."""

    def __init__(self, renderable: Any) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for line in console.render_lines(self._renderable, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()


def print_block(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print labeled lines under a title. Long texts are wrapped in their column."""
    from rich.table import Table
    from rich.text import Text

    block = Table.grid(padding=(0, 2))
    for label, text in rows:
        style = STYLES.get(label.partition(" ")[0], "bold cyan")
        block.add_row(Text(printable(label), style), Text(printable(text, lines=True), overflow="fold"))
    console = make_console()
    if title:
        console.print(Text(printable(title), "bold"), soft_wrap=True)
    console.print(Unpadded(block))


def announce(name: str, run_dir: Path) -> None:
    """Print the title of a run on a terminal before the run is created, so that users see at once that it starts."""
    from rich.text import Text

    global _announced
    console = make_console()
    if console.is_terminal and not console.is_dumb_terminal:
        title = _title(name, run_dir)
        console.print(title, style="bold", soft_wrap=True)
        lines = -(-Text(title).cell_len // console.width)
        _announced = (run_dir.absolute(), lines, texts_written())


def take_back_title() -> None:
    """Erase the announced title of a run that was refused, unless something was printed below it."""
    global _announced
    if _announced is not None and _announced[2] == texts_written():
        print(f"\x1b[{_announced[1]}A\x1b[J", end="", flush=True)
    _announced = None


def print_title(name: str, run_dir: Path) -> None:
    """Print the name and folder of a run as its first line, unless `announce` has printed them already."""
    global _announced
    if _announced is None or _announced[0] != run_dir.absolute():
        make_console().print(_title(name, run_dir), style="bold", soft_wrap=True)
    _announced = None


def _title(name: str, run_dir: Path) -> str:
    # A generated name contains the time and the date, which the folder shows as well.
    name = name.replace(f"{run_dir.name}-", "", 1).removesuffix(f"-{run_dir.parent.name}")
    return printable(show_path(run_dir) if name == run_dir.name else f"{name}  {show_path(run_dir)}")


def print_failure(error: BaseException) -> None:
    """Print the traceback of a failure on stderr, without credentials; that of another rank if it failed first."""
    text = f"{error}\n" if isinstance(error, RankFailed) else format_failure(error)
    print_to_stderr(without_credentials(text).removesuffix("\n"))


def show_path(path: Path) -> str:
    """Return a path as a user would type it: relative if it is in the working directory."""
    path = path.absolute()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def epoch_number(now: Timestamp) -> int:
    """Return the number of the epoch that is being trained or has just ended, counted from 1."""
    return now.epoch + (now.batch_in_epoch > 0 or now.epoch == 0)


def describe_time(now: Timestamp) -> str:
    """Return a position as text: 'in epoch 2, after 25 batches'; between epochs, 'after epoch 1 (19 batches)'."""
    batches = f"{now.batch:,} {'batch' if now.batch == 1 else 'batches'}"
    if now.epoch and not now.batch_in_epoch:
        return f"after epoch {epoch_number(now)} ({batches})"
    return f"in epoch {epoch_number(now)}, after {batches}"


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def show_in_cell(picture: bytes, kind: str) -> None:
    """Show a picture below a notebook's cell. `kind` is 'png' or 'svg'; other kinds are not shown."""
    from IPython.display import SVG, Image, display  # type: ignore[import-not-found]

    if kind == "svg":
        display(SVG(picture))
    elif kind == "png":
        display(Image(picture, format="png"))
