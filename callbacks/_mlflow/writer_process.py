"""The trainer's handle on the writer process: starts it, sends it commands and passes on its reports.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import runner

# This package's own folder comes first. Otherwise a `runner.py` in the working directory would be imported.
_ROOT = str(Path(runner.__file__).absolute().parents[1])
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from runner.callbacks._mlflow.senders import serve; serve()"

Receive = Callable[[dict[str, Any]], None]


class WriterProcess:
    """A process that imports MLflow and sends spools. It may outlive its trainer by a few seconds, to finish.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._deliveries: list[Receive | None] = []  # by number; None for one that has stopped
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            # Ctrl-C reaches only the trainer, which records how the run ended. In a separate session, `os.nice` would
            # have no effect, because Linux first divides the cores among sessions.
            process_group=0,
        )
        self.pid = self._process.pid
        threading.Thread(target=self._listen, args=(self._process.stdout,), name="mlflow-writer", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running and is a child of this process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def deliver(self, run_dir: Path, target: Mapping[str, Any], receive: Receive) -> int:
        """Start sending the spool of a run to a target, whose address includes credentials.

        `receive` is called on another thread with reports: `run_id`, `experiment_id`, the `offset` up to which the
        spool is sent, texts under `error`, `refused`, `renamed` and `behind`, and at the end `stopped` and perhaps
        `complete`.

        Returns:
            The number of the delivery, for `finish`.
        """
        number = len(self._deliveries)
        self._deliveries.append(receive)
        self._send(number, {"run_dir": str(run_dir), "target": dict(target)})
        return number

    def finish(self, number: int) -> None:
        """Send the rest of a run's spool without pauses, because nothing more will be added to it."""
        self._send(number, {})

    def _send(self, number: int, command: Mapping[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps({"number": number, **command}) + "\n")  # type: ignore[union-attr]
        except (OSError, ValueError):  # broken, or closed by the listening thread
            self._lose(number)

    def _listen(self, reports: IO[str]) -> None:
        with reports:
            for line in reports:
                self._receive(json.loads(line))
        self._process.wait()
        with contextlib.suppress(OSError):  # the process may not have read the last command
            self._process.stdin.close()  # type: ignore[union-attr]
        for number in range(len(self._deliveries)):
            self._lose(number)

    def _receive(self, report: dict[str, Any]) -> None:
        if receive := self._deliveries[report["number"]]:
            if "stopped" in report:
                self._deliveries[report["number"]] = None
            receive(report)

    def _lose(self, number: int) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its output, so it is about to end
            self._process.wait(1.0)
        error = f"the process that sends to it has ended unexpectedly, with exit code {self._process.returncode}"
        self._receive({"number": number, "error": error, "stopped": True})


_writer: WriterProcess | None = None


def shared_writer() -> WriterProcess:
    """Return this process's writer, which is started if it is not running. Later runs reuse it."""
    global _writer
    if _writer is None or not _writer.is_alive:
        _writer = WriterProcess()
    return _writer
