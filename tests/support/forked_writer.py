"""Forks the MLflow writers that a test process starts, because a real writer takes seconds to import MLflow."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from time import monotonic, sleep  # by name, because the `steady` fixture replaces `time.sleep`
from types import SimpleNamespace
from typing import Any

from python_process import CAN_FORK, PythonProcess


class ForkedWriter:
    """Stands in for `subprocess.Popen` in `WriterProcess`, which polls it from two threads."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        del options["text"], options["bufsize"]
        self._lock = threading.Lock()
        self._process = PythonProcess(args[1:], forks=False, **options)
        self.pid = self._process.pid
        self.stdin = io.TextIOWrapper(io.BufferedWriter(self._process.stdin), line_buffering=True)  # type: ignore[arg-type]
        self.stdout = io.TextIOWrapper(self._process.stdout)  # type: ignore[arg-type]
        _started.append(self)

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with self._lock:
            return self._process.poll()

    def wait(self, timeout: float = float("inf")) -> int:
        """Wait for the process to end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process is still running after `timeout` seconds.
        """
        deadline = monotonic() + timeout
        while (code := self.poll()) is None:
            if monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._process.args, timeout)
            sleep(0.01)
        return code


_started: list[ForkedWriter] = []


def end_writers() -> None:
    """End the writers of this process, and kill those that take more than ten seconds to end."""
    for writer in _started:
        with contextlib.suppress(OSError):
            writer.stdin.close()
        try:
            writer.wait(10.0)
        except subprocess.TimeoutExpired:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
    _started.clear()


def fork_writers() -> None:
    """Make this process fork the MLflow writers that it starts."""
    from runner.callbacks._mlflow import writer_process

    if CAN_FORK:
        names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
        writer_process.subprocess = SimpleNamespace(Popen=ForkedWriter, **names)  # type: ignore[attr-defined]
