"""Terminal output for people: the console, blocks of labelled lines, failures, and the format of paths and times."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from runner.addresses import without_credentials
from runner.failures import RankFailed
from runner.tracebacks import format_failure

if TYPE_CHECKING:
    from runner.time import Timestamp

STYLES = {"ok": "bold green", "warning": "bold yellow"}
"""Styles by the first word of a label."""


def make_console(width: int = 120) -> Any:
    """Return a console as wide as the terminal, or `width` columns wide if standard output is not a terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, force_jupyter=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, force_jupyter=False, width=width)


def print_block(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print labelled lines under a title.

    Args:
        title: the title, printed in bold; if it is empty, no title is printed.
        rows: pairs of label and text; a text that is too long is wrapped in its column.
    """
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


def print_failure(error: BaseException) -> None:
    """Print the traceback of a failure on stderr, from the rank that failed first and without credentials."""
    text = f"{error}\n" if isinstance(error, RankFailed) else format_failure(error)
    print(without_credentials(text), end="", file=sys.stderr, flush=True)


def show_path(path: Path) -> str:
    """Return a path as a user would type it: relative if it is inside the working directory."""
    path = path.absolute()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def epoch_number(now: Timestamp) -> int:
    """Return the number of the epoch that is being trained or has just ended, counted from 1."""
    return now.epoch + (now.batch_in_epoch > 0 or now.epoch == 0)


def describe_time(now: Timestamp) -> str:
    """Return a position as text: 'in epoch 2, after 25 batches', or between epochs 'after epoch 1 (19 batches)'."""
    batches = f"{now.batch} {'batch' if now.batch == 1 else 'batches'}"
    if now.epoch and not now.batch_in_epoch:
        return f"after epoch {epoch_number(now)} ({batches})"
    return f"in epoch {epoch_number(now)}, after {batches}"


@contextmanager
def lasting_output() -> Iterator[None]:
    """Keep printing from failing within the `with` block, by dropping text that cannot be written.

    Writing fails when the disk is full or the terminal has been closed. When text of one stream is lost for the first
    time, a warning goes to the other stream, unless the reader has merely stopped reading, as with `| head`.
    """
    for number in (0, 1, 2):  # if one is closed (`>&-`), the next file opened would get its number
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    out = sys.stdout or os.fdopen(1, "w", closefd=False)
    err = sys.stderr or os.fdopen(2, "w", closefd=False)
    lasting_out: Any = _LastingStream(out, "stdout", err)
    lasting_err: Any = _LastingStream(err, "stderr", out)
    with redirect_stdout(lasting_out), redirect_stderr(lasting_err):
        yield


@contextmanager
def labelled_lines(label: str) -> Iterator[None]:
    """Put a label in front of each line that this process prints or logs within the `with` block.

    Args:
        label: the text at the beginning of each line; if it is empty, lines stay as they are.
    """
    if not label:
        yield
        return
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            labelled: Any = _LabelledLines(stream, label)
            stack.callback(labelled.end)
            stack.enter_context(redirect(labelled))
            _move_logs(stack, stream, labelled)
        yield


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def is_interactive(console: Any) -> bool:
    """Return whether someone watches a console on which a line can be redrawn."""
    return in_notebook() or (console.is_terminal and not console.is_dumb_terminal)


@contextmanager
def live_line(console: Any, draw: Callable[[], Any], refresh_per_second: float) -> Iterator[None]:
    """Keep redrawing a line within the `with` block: the last line of a terminal, or a line of a notebook's cell.

    On a terminal, anything printed or logged meanwhile appears above it.

    Args:
        console: a console for which `is_interactive` is true.
        draw: a function that returns the content of the line; called on a background thread.
        refresh_per_second: redraws per second.
    """
    if in_notebook():
        with _line_of_cell(console, draw, 1 / refresh_per_second):
            yield
        return
    from rich.live import Live

    stderr = sys.stderr
    live = Live(
        console=console,
        refresh_per_second=refresh_per_second,
        transient=True,
        get_renderable=draw,
        redirect_stderr=stderr.isatty(),  # redirecting would divert stderr from its file
    )
    with live, ExitStack() as stack:
        _move_logs(stack, stderr, sys.stderr)
        yield


def show_in_cell(picture: bytes, kind: str) -> None:
    """Show a picture below a notebook's cell; `kind` is png or svg, and others cannot be shown."""
    from IPython.display import SVG, Image, display  # type: ignore[import-not-found]

    if kind == "svg":
        display(SVG(picture))
    elif kind == "png":
        display(Image(picture, format="png"))


@contextmanager
def _line_of_cell(console: Any, draw: Callable[[], Any], interval: float) -> Iterator[None]:
    from IPython.display import display  # type: ignore[import-not-found] (a notebook has it)

    def content() -> dict[str, str]:
        with console.capture() as captured:
            console.print(draw())
        return {"text/plain": captured.get().rstrip()}

    def redraw() -> None:
        while not ended.wait(interval):
            line.update(content(), raw=True)

    ended = threading.Event()
    line: Any = display(content(), raw=True, display_id=True)
    thread = threading.Thread(target=redraw, name="live line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.update({"text/plain": ""}, raw=True)  # as on a terminal, where it goes with the end of training


def _move_logs(stack: ExitStack, before: TextIO, now: TextIO) -> None:
    """Redirect logging from one stream to another until a stack is closed, as handlers do not follow `sys.stderr`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(now)
            stack.callback(handler.setStream, before)


class _LastingStream:
    """Writes text to a stream, and drops text that cannot be written.

    Args:
        stream: the stream to write to.
        name: the stream's name, for the warning.
        other: the stream to which the warning goes.
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO) -> None:
        self._stream = stream
        self._name = name
        self._other = other
        self._has_warned = False

    def write(self, text: str) -> int:
        with self._ignoring_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignoring_errors():
            self._stream.flush()

    @contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            pass
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                with suppress(OSError):
                    lost = f"{self._name} cannot be written ({error}): what is printed there is lost, the run goes on"
                    print(f"WARNING: {lost}", file=self._other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LabelledLines:
    """Writes complete lines to a stream, each with a label in front.

    The stream reports that it is not a terminal, so that no progress bar is drawn on it.

    Args:
        stream: the stream to write to.
        label: the text at the beginning of each line.
    """

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream = stream
        self._label = label
        self._unfinished = ""  # the start of a line whose end has not been written yet
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._unfinished = (self._unfinished + text).split("\n")
            if lines:
                self._stream.write("".join(f"{self._label}  |  {line}\n" for line in lines))
                self._stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return False

    def end(self) -> None:
        if self._unfinished:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
