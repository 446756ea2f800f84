"""The progress of a sweep: a line for each job that ends, in whichever process it runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.files.addresses import without_credentials
from runner.files.names import RESULT
from runner.files.printable import printable
from runner.records.folder import LOG
from runner.records.result import Result, read_result
from runner.records.sweep_jobs import claims
from runner.sweeps.names import describe, swept_values
from runner.terminal.console import make_console, show_path
from runner.terminal.live_line import is_interactive, live_line
from runner.terminal.text import columns, shortened, show_seconds

if TYPE_CHECKING:
    from runner.sweeps.sweep import Sweep

INTERVAL = 0.5  # seconds between two checks of the sweep's folder
WIDEST = 48  # columns for the swept values


class SweepProgress:
    """Watches the folder of a sweep, and prints a line for each job that ends: the only output while jobs run.

    It watches on a thread of the process that leads the sweep, so it works the same for all launchers. On a terminal,
    the last line shows the number of jobs that are done, and the latest output of the running job.

    Args:
        sweep: the sweep.
        planned: the overrides of the planned jobs, as far as they are known; they determine the width of the columns.
        total: the number of jobs; None if it is unknown.
    """

    def __init__(self, sweep: Sweep, planned: Sequence[Sequence[str]], total: int | None) -> None:
        self._sweep = sweep
        self._total = total
        self._width = min(WIDEST, max(len(self._describe(overrides)) for overrides in planned))
        self._out = sys.stdout  # a job in this process redirects it
        self._before = self._results()  # the results of earlier commands
        self._ended: set[str] = set()  # the keys of the jobs whose end was printed
        self._running: list[Result] = []
        self._parallel = 1  # jobs that ran in parallel at the last check in which no job ended
        self._seconds: list[float] = []  # training times of the jobs that this command trained
        self._started_at = time.monotonic()
        self._sayings: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sweep progress", daemon=True)
        self._live = ExitStack()

    def start(self) -> None:
        """Print the jobs that ended in earlier commands, and start watching the others."""
        jobs = "" if self._total is None else f": {self._total} {'job' if self._total == 1 else 'jobs'}"
        self._print(f"{self._sweep.name}{jobs} in {show_path(self._sweep.folder)}")
        console = make_console()
        if is_interactive(console):
            self._live.enter_context(live_line(console, self._draw, interval=0.5))
            self._out = sys.stdout  # prints above the live line
        finished = {key: (path, result) for key, (path, result) in self._before.items() if self._sweep.is_over(result)}
        for key, (_, result) in sorted(finished.items(), key=_changed_at):
            self._print_end(key, result)
        if finished:
            self._print("--afresh trains these again, in a new sweep")
        if any(result.status == "PRUNED" for _, result in finished.values()):
            self._print("--revive all continues pruned jobs")
        self._thread.start()

    def say(self, *lines: str) -> None:
        """Print lines below those of the jobs that have ended, at the next check."""
        self._sayings += lines

    def stop(self) -> None:
        """Print the jobs that have ended since the last check, and end the thread."""
        self._stopped.set()
        self._thread.join()
        self._check()
        self._live.close()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self._check()

    def _results(self, excluded: Collection[str] = ()) -> dict[str, tuple[Path, Result]]:
        """Return the folders and results of jobs, refused ones too, by key; `excluded` keys are left out."""
        folder = self._sweep.folder
        jobs = {job.key: (job.folder, job.result()) for job in claims(folder, excluded)}
        refused = [path for path in folder.glob(".refused-*") if path.name not in excluded]
        jobs |= {path.name: (path, read_result(path)) for path in refused}
        return {key: (path, result) for key, (path, result) in jobs.items() if result is not None}

    def _check(self) -> None:
        """Print the jobs that have ended since the last check."""
        ended = len(self._ended)
        results = self._results(self._ended)
        self._running = [result for _, result in results.values() if result.status == "RUNNING"]
        for key, (_, result) in sorted(results.items(), key=_changed_at):
            _, before = self._before.get(key, (None, None))
            is_new = before is None or (before.status, before.seconds) != (result.status, result.seconds)
            if result.status not in ("RUNNING", "QUEUED") and is_new:
                self._print_end(key, result)
        while self._sayings:
            self._print(self._sayings.pop(0))
        if len(self._ended) == ended:
            self._parallel = max(1, len(self._running))

    def _print_end(self, key: str, result: Result) -> None:
        """Print the line of a job that has ended."""
        self._ended.add(key)
        _, before = self._before.get(key, (None, None))
        parts = [self._count(), self._describe(result.overrides).ljust(self._width), _outcome(result)]
        if self._sweep.is_over(before):
            self._print("  ".join([*parts, "skipped: it has already ended"]))
            return
        if result.status != "REFUSED":
            self._seconds.append(result.seconds)
            parts.append(f"{show_seconds(result.seconds):>8}")
        if result.status in ("FAILED", "REFUSED"):
            parts.append(without_credentials(result.message.partition("\n")[0]))
        elif (remaining := self._remaining_seconds()) is not None:
            parts.append(f"{show_seconds(remaining)} left")
        self._print("  ".join(parts))

    def _count(self) -> str:
        if self._total is None:
            return f"{len(self._ended):>3}"
        total = max(self._total, len(self._ended))  # a search without a seed draws other values when it is repeated
        return f"{len(self._ended):>{len(str(total))}}/{total}"

    def _remaining_seconds(self) -> float | None:
        """Return an estimate of the remaining seconds; None if the number of jobs is unknown, or if all have ended.

        It assumes that jobs take as long as those so far, and that as many run in parallel as now.
        """
        if self._total is None or len(self._ended) >= self._total:
            return None
        jobs = self._total - len(self._ended)
        parallel = min(jobs, self._parallel)
        seconds = sum(self._seconds) / len(self._seconds)
        if parallel == 1:  # the time between jobs, in which they start and send to MLflow, is known as well
            seconds = max(seconds, (time.monotonic() - self._started_at) / len(self._seconds))
        return seconds * jobs / parallel

    def _describe(self, overrides: Sequence[str]) -> str:
        return describe(swept_values(overrides, self._sweep.fixed)) or "the only job"

    def _draw(self) -> Any:
        """Return the last line of the terminal. Called on the thread that refreshes the terminal."""
        from rich.text import Text

        running = self._running
        texts = [f"{self._count()} done", f"{show_seconds(time.monotonic() - self._started_at)}"]
        if running:
            more = f" and {len(running) - 1} more" if len(running) > 1 else ""
            texts.append(f"running {self._describe(running[0].overrides)}{more}")
            texts.append(_last_line(self._sweep.folder / running[0].name / LOG))
        return Text("  ".join(texts), "dim", no_wrap=True, overflow="ellipsis")

    def _print(self, line: str) -> None:
        line = printable(line)
        print(shortened(line, columns()) if self._out.isatty() else line, file=self._out, flush=True)


def _outcome(result: Result) -> str:
    """Return the objective of a job, such as 'eval 0.982' or 'eval loss 0.213'; without an objective, its status."""
    if result.status != "FINISHED" or result.objective is None:
        return result.status.ljust(10)
    label, _, name = result.objective_name.partition("/")
    return f"{label} loss {result.objective:<7.4g}" if name == "loss" else f"{label} {result.objective:<6.4g}"


def _last_line(path: Path) -> str:
    """Return the last line of a text file, at most 500 bytes of it; empty if the file is missing or empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 500))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def _changed_at(job: tuple[str, tuple[Path, Result]]) -> float:
    _, (folder, _) = job
    try:
        return (folder / RESULT).stat().st_mtime
    except OSError:
        return 0.0
