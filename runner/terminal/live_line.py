"""A progress line that is redrawn in place, on a terminal or in a notebook."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from runner.terminal.console import in_notebook
from runner.terminal.output import move_logs


def is_interactive(console: Any) -> bool:
    """Return whether a line can be redrawn on a console, and someone is watching. Nobody watches a CI log."""
    if os.environ.get("CI", "false").lower() not in ("", "0", "false"):
        return False
    return in_notebook() or (console.is_terminal and not console.is_dumb_terminal)


@contextmanager
def live_line(console: Any, draw: Callable[[], Any], interval: float) -> Iterator[None]:
    """Keep redrawing a line within the `with` block: the last line of a terminal, or a line of a notebook's cell.

    On a terminal, anything printed or logged meanwhile appears above the line. At the end, the line disappears. `draw`
    is called on a background thread, every `interval` seconds.
    """
    if in_notebook():
        with _line_of_cell(console, draw, interval):
            yield
        return
    from rich.live import Live

    stderr = sys.stderr
    live = Live(
        console=console,
        refresh_per_second=1 / interval,
        transient=True,
        get_renderable=draw,
        redirect_stderr=stderr.isatty(),  # if stderr is a file, its text must not go to the console instead
    )
    with live, ExitStack() as stack:
        move_logs(stack, stderr, sys.stderr)
        yield


@contextmanager
def repeated(work: Callable[[], None], interval: float) -> Iterator[None]:
    """Call a function on a background thread every `interval` seconds within the `with` block."""

    def repeat() -> None:
        while not ended.wait(interval):
            work()

    ended = threading.Event()
    thread = threading.Thread(target=repeat, name="live line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _line_of_cell(console: Any, draw: Callable[[], Any], interval: float) -> Iterator[None]:
    from IPython.display import display  # type: ignore[import-not-found] (a notebook has it)

    def content() -> dict[str, str]:
        with console.capture() as captured:
            console.print(draw())
        return {"text/plain": captured.get().rstrip()}

    line: Any = display(content(), raw=True, display_id=True)
    try:
        with repeated(lambda: line.update(content(), raw=True), interval):
            yield
    finally:
        line.update({"text/plain": ""}, raw=True)  # the line disappears, as on a terminal
