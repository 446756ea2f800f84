"""The trainer's handle on the writer process: starts it, sends it commands and receives its reports.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import runner
from runner.terminal.commands import override, show_command

log = logging.getLogger("runner")

# This package's own folder comes first, or a `runner.py` in the working directory would be imported instead.
_ROOT = str(Path(runner.__file__).absolute().parents[1])
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from runner.callbacks._mlflow.writer_main import serve; serve()"

SOON = 1.0
LATER = 5.0
"""Seconds to wait for the writer before printing a message, on a terminal and elsewhere."""


class Progress:
    """The progress of the writer with one run, as last reported."""

    def __init__(self, number: int, run_dir: Path) -> None:
        self.number = number
        """Number of the delivery, by which commands and reports name it."""
        self.run_dir = run_dir
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.offset = 0
        """Bytes of the spool that MLflow has."""
        self.complete = False
        """Whether MLflow has all of it, with the run's final status."""
        self.stopped = threading.Event()
        """Set when the writer does no more for this run: it is complete or was given up, or the writer has ended."""
        self._warned: set[str] = set()

    def update(self, report: dict[str, Any]) -> None:
        """Process a report of the writer about this run."""
        for name in ("run_id", "experiment_id", "offset", "complete"):
            setattr(self, name, report.get(name, getattr(self, name)))
        if "error" in report:
            self.warn(report["error"])
        for kind in {"refused", "renamed"} & report.keys() - self._warned:
            self._warned.add(kind)
            log.warning("MLflow: %s (any others are in %s)", report[kind], self.run_dir / "mlflow" / "writer.log")
        if report.get("stopped"):
            self.stopped.set()

    def wait(self, size: int, timeout: float) -> None:
        """Wait until the writer has sent the spool, of `size` bytes, and print progress on stderr if that takes long.

        It warns when the writer has not sent all of it after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        terminal = sys.stderr.isatty()
        erase, end = ("\r\x1b[K", "") if terminal else ("", "\n")
        quiet, pause = (SOON, 0.5) if terminal else (LATER, 10.0)  # less often in a log file
        if not self.stopped.wait(min(quiet, timeout)):
            while (left := deadline - time.monotonic()) > 0:
                line = f"saving to MLflow: {self._share(size)} is there; waiting up to {left:.0f} s"
                print(f"{erase}{line}", end=end, file=sys.stderr, flush=True)
                if self.stopped.wait(min(pause, left)):
                    break
            print(end=erase, file=sys.stderr, flush=True)
        if not self.complete:
            self.warn(f"{self._share(size)} was there when the run ended")

    def warn(self, reason: str) -> None:
        """Warn, once per run, what is wrong and what to do."""
        if "error" not in self._warned:
            self._warned.add("error")
            log.warning("MLflow: %s. Training does not wait for it: %s", reason.rstrip(". "), how_to_send(self.run_dir))

    def _share(self, size: int) -> str:
        return f"{self.offset / max(size, 1):.0%} of what was logged"


def how_to_send(run_dir: Path) -> str:
    """Return a sentence on what happens to data that is not sent, and what to do about it."""
    return (
        f"what is logged is kept in {run_dir / 'mlflow'}, and sent when MLflow can be reached again, by the next run, "
        f"or by `{show_command('mode=sync', override('resume', str(run_dir)))}`"
    )


class WriterProcess:
    """A process that imports MLflow and sends spools. It outlives its trainer by a few seconds, to finish.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._runs: list[Progress] = []
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            # Ctrl-C reaches only the trainer, which records how the run ended. No separate session: Linux shares the
            # cores out among sessions first, and `os.nice` would count for nothing.
            process_group=0,
        )
        self.pid = self._process.pid
        threading.Thread(target=self._listen, args=(self._process.stdout,), name="mlflow-writer", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process is running and is a child of this process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def deliver(self, run_dir: Path, target: Mapping[str, Any]) -> Progress:
        """Start sending the spool of a run to a target, whose address includes credentials."""
        progress = Progress(len(self._runs), run_dir)
        self._runs.append(progress)
        self._send(progress, {"run_dir": str(run_dir), "target": dict(target)})
        return progress

    def finish(self, progress: Progress) -> None:
        """Send the rest of a run's spool immediately, because nothing more will be added to it."""
        self._send(progress, {})

    def _send(self, progress: Progress, command: Mapping[str, Any]) -> None:
        try:
            line = json.dumps({"number": progress.number, **command}) + "\n"
            self._process.stdin.write(line)  # type: ignore[union-attr]
        except (OSError, ValueError):  # broken, or closed by the listening thread
            self._lose(progress)

    def _listen(self, reports: IO[str]) -> None:
        with reports:
            for line in reports:
                report = json.loads(line)
                self._runs[report["number"]].update(report)
        self._process.wait()
        with contextlib.suppress(OSError):  # the last command may be left unread
            self._process.stdin.close()  # type: ignore[union-attr]
        for progress in self._runs:
            if not progress.stopped.is_set():
                self._lose(progress)

    def _lose(self, progress: Progress) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed its output, so it is ending
            self._process.wait(1.0)
        progress.warn(f"the process that sends to it has ended unexpectedly, with exit code {self._process.returncode}")
        progress.stopped.set()


_writer: WriterProcess | None = None


def shared_writer() -> WriterProcess:
    """Return the writer of this process, starting it if there is none. It is reused by later runs."""
    global _writer
    if _writer is None or not _writer.alive:
        _writer = WriterProcess()
    return _writer
