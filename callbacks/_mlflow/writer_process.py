"""The trainer's side of the writer process: start it, name runs to it, hear how far it is. Standard library only."""

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

log = logging.getLogger("runner")

# The folder of this very package comes first: a `runner.py` where the user works would be imported in its place.
_ROOT = str(Path(runner.__file__).absolute().parents[1])
_PROGRAM = f"import sys; sys.path.insert(0, {_ROOT!r}); from runner.callbacks._mlflow.writer_main import serve; serve()"


class Progress:
    """How far the writer is with one run, as far as it has said.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.lines = 0
        """Lines of the spool that MLflow has."""
        self.complete = False
        """Whether MLflow has all of it, with the run's final status."""
        self.stopped = threading.Event()
        """Set when the writer does no more for this run: it is complete, was given up, or the writer ended."""
        self._warned = False
        self._told: set[str] = set()

    def update(self, report: dict[str, Any]) -> None:
        """Take what the writer said about this run."""
        for name in ("run_id", "experiment_id", "lines", "complete"):
            setattr(self, name, report.get(name, getattr(self, name)))
        if "error" in report:
            self.warn(report["error"])
        for kind in {"refused", "renamed"} & report.keys() - self._told:
            self._told.add(kind)
            log.warning("MLflow: %s (any others are in %s)", report[kind], self.run_dir / "mlflow" / "writer.log")
        if report.get("stopped"):
            self.stopped.set()

    def wait(self, lines: int, timeout: float) -> None:
        """Wait until the writer has stopped; after a second, say on stderr how far it is.

        Args:
            lines: lines of the finished spool.
            timeout: seconds.
        """
        deadline = time.monotonic() + timeout
        if not self.stopped.wait(min(1.0, timeout)):
            terminal = sys.stderr.isatty()
            start, end = ("\r", "") if terminal else ("", "\n")
            while True:
                print(f"{start}sending to MLflow: {self.lines} of {lines} lines", end=end, file=sys.stderr, flush=True)
                pause = 0.5 if terminal else 10.0  # a log file does not want a line each moment
                if self.stopped.wait(max(0.0, min(pause, deadline - time.monotonic()))) or time.monotonic() >= deadline:
                    break
            if terminal:
                print(file=sys.stderr)
        if not self.complete:
            self.warn(f"{self.lines} of {lines} lines were sent when the run ended")

    def warn(self, reason: str) -> None:
        """Say once per run what is wrong and what to do."""
        if not self._warned:
            self._warned = True
            log.warning("MLflow: %s. Training does not wait for it: %s", reason.rstrip(". "), how_to_send(self.run_dir))


def how_to_send(run_dir: Path) -> str:
    """What happens to a spool that is not sent, and what to do about it."""
    return (
        f"what is logged is kept in {run_dir / 'mlflow'}, and sent when MLflow can be reached again, by the next run, "
        f"or by `python -m runner mode=sync resume={run_dir}`"
    )


class WriterProcess:
    """A process that imports MLflow and sends spools; it outlives its trainer by some seconds, to finish.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._runs: dict[str, Progress] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C reaches the trainer, which then says how the run ended
        )
        self.pid = self._process.pid
        threading.Thread(target=self._listen, args=(self._process.stdout,), name="mlflow-writer", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it still runs, as a child of this very process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def deliver(self, run_dir: Path, order: Mapping[str, Any]) -> Progress:
        """Have it send the spool of a run from now on, to where an order with all credentials says."""
        progress = self._runs[str(run_dir)] = Progress(run_dir)
        self._tell(progress, {"deliver": str(run_dir), "order": dict(order)})
        return progress

    def finish(self, progress: Progress) -> None:
        """Have it send the rest at once: nothing will be added to the run's spool."""
        self._tell(progress, {"finish": str(progress.run_dir)})

    def _tell(self, progress: Progress, wish: Mapping[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(wish) + "\n")  # type: ignore[union-attr]
        except (OSError, ValueError):  # broken, or closed by the thread that listens
            self._lose(progress)

    def _listen(self, reports: IO[str]) -> None:
        with reports:
            for line in reports:
                report = json.loads(line)
                self._runs[report["run"]].update(report)
        self._process.wait()
        with contextlib.suppress(OSError):  # what was written last may have found nobody to read it
            self._process.stdin.close()  # type: ignore[union-attr]
        for progress in list(self._runs.values()):
            if not progress.stopped.is_set():
                self._lose(progress)

    def _lose(self, progress: Progress) -> None:
        progress.warn("the process that sends to it has ended unexpectedly")
        progress.stopped.set()


_writer: WriterProcess | None = None


def shared_writer() -> WriterProcess:
    """The writer of this process, started when there is none; it serves one run after another."""
    global _writer
    if _writer is None or not _writer.alive:
        _writer = WriterProcess()
    return _writer
