"""Output streams that survive write errors, and the log file of a job."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within the `with` block, drop text that cannot be written, so that printing never fails.

    Writing fails when the disk is full or the terminal has been closed. The first time that stdout or stderr loses
    text, a warning goes to the other one, unless the reader has merely stopped reading, as with `| head`.
    """
    for number in (0, 1, 2):  # if one is closed (`>&-`), the next file to be opened would get its number
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    out = sys.stdout or os.fdopen(1, "w", closefd=False)
    err = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (out, err):
        if isinstance(stream, io.TextIOWrapper):  # a terminal's encoding may lack characters, such as accents
            stream.reconfigure(errors="replace")
    lasting_out: Any = _LastingStream(out, "stdout", err)
    lasting_err: Any = _LastingStream(err, "stderr", out)
    with redirect_stdout(lasting_out), redirect_stderr(lasting_err):
        yield


@contextmanager
def output_to(path: str, is_printed: bool = False) -> Iterator[None]:
    """Within the `with` block, append all output and logging of this process to a file instead of the terminal.

    With `is_printed`, the terminal gets everything too. Without a path, output goes only to the terminal.
    """
    if not path:
        yield
        return
    with ExitStack() as stack:
        file = Path(path).open("a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        stack.callback(_close, file)
        lasting: Any = _LastingStream(file, Path(path).name, sys.stderr)

        def to_file(stream: Any) -> Any:
            return _Both(stream, lasting) if is_printed else lasting

        stack.enter_context(redirect_stdout(to_file(sys.stdout)))
        stack.enter_context(redirect_stderr(to_file(sys.stderr)))
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:  # its stream may be the one that `sys.stderr` wraps
                stack.callback(handler.setStream, handler.stream)
                handler.setStream(to_file(handler.stream))
        yield


def texts_written() -> int:
    """Return how often this process has written text; if two counts are equal, nothing was printed in between."""
    return _LastingStream.written


def _close(file: TextIO) -> None:
    with suppress(OSError):  # the disk is full; a warning has said so
        file.close()


def move_logs(stack: ExitStack, before: TextIO, now: TextIO) -> None:
    """Redirect logging from one stream to another until `stack` is closed. Handlers do not follow `sys.stderr`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(now)
            stack.callback(handler.setStream, before)


class _Both:
    """A stream whose text also goes to a file."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _LastingStream:
    """Writes text to a stream, and drops text that cannot be written, with one warning to `other`."""

    written = 0  # number of writes, summed over all instances

    def __init__(self, stream: TextIO, name: str, other: TextIO) -> None:
        self._stream = stream
        self._name = name
        self._other = other
        self._has_warned = False

    def write(self, text: str) -> int:
        _LastingStream.written += 1
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
                    warning = f"cannot write to {self._name} ({error}): this output is lost, but the run continues"
                    print(f"WARNING: {warning}", file=self._other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
