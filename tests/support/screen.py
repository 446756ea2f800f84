"""Runs programs on a terminal, and renders the text that the terminal then shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from python_process import PATIENCE, start_python

_CODES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def screen(output: str) -> str:
    """Return the text that a terminal of unlimited size shows after this output, with the codes that rich writes."""
    lines = [""]
    row = column = 0
    for argument, code, moves, text in _CODES.findall(output):
        if moves == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif moves == "\r":
            column = 0
        elif code == "A":
            row -= int(argument or 1)
        elif code == "K":
            lines[row] = "" if argument == "2" else lines[row][:column]
        elif text:
            before = lines[row].ljust(column)[:column]
            lines[row] = before + text + lines[row][column + len(text) :]
            column += len(text)
        else:
            assert code in "mhl", f"this function does not know the code {argument}{code}"
    return "\n".join(lines)


def on_terminal(
    arguments: Sequence[str],
    columns: int,
    folder: Path,
    env: Mapping[str, str] = {},
    react: Callable[[str, Any], None] = lambda output, process: None,
) -> tuple[int, str]:
    """Run Python on a terminal, and return its exit code and what it wrote.

    Args:
        arguments: command-line arguments of Python.
        columns: the width of the terminal.
        folder: the working directory.
        env: additional environment variables.
        react: called whenever the program has written more, with all its output so far and with its process, whose
            `stdin` is a pipe.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "CI", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", **env}
    written = b""
    with start_python(
        arguments, cwd=folder, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        deadline = time.monotonic() + PATIENCE
        while (seconds := deadline - time.monotonic()) > 0 and select.select([ours], [], [], seconds)[0]:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # on Linux, reading fails once the other side is closed
                break
            if not chunk:
                break
            written += chunk
            react(written.decode(errors="replace"), process)
        else:
            process.kill()
    os.close(ours)
    assert process.returncode is not None
    return process.returncode, written.decode()
