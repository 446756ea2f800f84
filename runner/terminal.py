"""What is printed for people: one kind of console, labelled lines, paths as one types them, one count of epochs."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from runner.time import Timestamp

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


def epoch_number(now: Timestamp) -> int:
    """Return the number, from 1, of the epoch that is being trained or has just ended."""
    return now.epoch + (now.batch_in_epoch > 0 or now.epoch == 0)


def describe_time(now: Timestamp) -> str:
    """Return where training stands: 'in epoch 2, after 25 batches', or between two, 'after epoch 1 (19 batches)'."""
    batches = f"{now.batch} {'batch' if now.batch == 1 else 'batches'}"
    if now.epoch and not now.batch_in_epoch:
        return f"after epoch {epoch_number(now)} ({batches})"
    return f"in epoch {epoch_number(now)}, after {batches}"


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, printing never fails: what a full disk or a terminal that is gone does not take is lost.

    The first loss on a stream is told on the other one, unless nobody reads what is printed any more, as with `| head`.
    """
    for number in (0, 1, 2):  # one that is closed (`>&-`) would be the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    out, err = sys.stdout or os.fdopen(1, "w", closefd=False), sys.stderr or os.fdopen(2, "w", closefd=False)
    lasting_out: Any = _LastingStream(out, "stdout", err)
    lasting_err: Any = _LastingStream(err, "stderr", out)
    with redirect_stdout(lasting_out), redirect_stderr(lasting_err):
        yield


@contextmanager
def labelled_lines(label: str) -> Iterator[None]:
    """Inside, each line that this process prints or logs begins with a label; with an empty one, as ever."""
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


@contextmanager
def live_line(console: Any, draw: Callable[[], Any], refresh_per_second: float) -> Iterator[None]:
    """Inside, the last line of a terminal is drawn again and again, below what is printed and logged meanwhile.

    Args:
        console: a terminal.
        draw: returns what stands in the line; called by a thread.
        refresh_per_second: how often, in hertz.
    """
    from rich.live import Live

    stderr = sys.stderr
    live = Live(
        console=console,
        refresh_per_second=refresh_per_second,
        transient=True,
        get_renderable=draw,
        redirect_stderr=stderr.isatty(),  # where it is a file, it stays one
    )
    with live, ExitStack() as stack:
        _move_logs(stack, stderr, sys.stderr)
        yield


def _move_logs(stack: ExitStack, before: TextIO, now: TextIO) -> None:
    """Have what is logged to one stream go to another until a stack is closed: handlers keep the stream they have."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(now)
            stack.callback(handler.setStream, before)


class _LastingStream:
    """Passes text on to a stream, and drops what the stream does not take.

    Args:
        stream: takes the text.
        name: of it.
        other: is told of a loss.
    """

    def __init__(self, stream: TextIO, name: str, other: TextIO) -> None:
        self._stream = stream
        self._name = name
        self._other = other
        self._told = False

    def write(self, text: str) -> int:
        with self._losing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            self._stream.flush()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            pass
        except OSError as error:
            if not self._told:
                self._told = True
                with suppress(OSError):
                    lost = f"{self._name} cannot be written ({error}): what is printed there is lost, the run goes on"
                    print(f"WARNING: {lost}", file=self._other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LabelledLines:
    """Hands whole lines to a stream, each behind a label. It is no terminal, so that nobody draws a moving bar."""

    def __init__(self, stream: TextIO, label: str) -> None:
        self._stream = stream
        self._label = label
        self._begun = ""  # a line whose end is still to come
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if lines:
                self._stream.write("".join(f"{self._label}  |  {line}\n" for line in lines))
                self._stream.flush()
        return len(text)

    def isatty(self) -> bool:
        return False

    def end(self) -> None:
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
