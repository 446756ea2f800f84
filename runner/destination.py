"""Where logged values go. Imports no torch, so that a destination can start its helpers before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.hooks import Callback
from runner.time import Timestamp


class Record(NamedTuple):
    """Metrics that were logged together: read back, all values are floats."""

    metrics: dict[str, Any]
    step: int
    """Batches trained before it was logged, counting the batch that it describes."""
    timestamp: Timestamp
    wall_time: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class SweepSummary:
    """What came of a sweep.

    Attributes:
        folder: the sweep's.
        sweep: its id, which its jobs have as the tag `runner.sweep`.
        name: made of what is swept.
        status: RUNNING before the first job, then FINISHED, FAILED, or KILLED by a signal.
        tables: columns and rows by name: the jobs, best first, and means where only the seed differs.
        best: what is to be known of the best job, by name.
        metrics: of the sweep as a whole, by key.
        files: tables and pictures, in the sweep's folder.
    """

    folder: Path
    sweep: str
    name: str
    status: str
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] = field(default_factory=dict)
    best: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Sequence[Path] = ()


class LoggerDestination(Callback):
    """Where logged values go: a callback with these methods, all of them optional.

    Metrics arrive from a background thread, in order, as Python floats; everything else arrives on the thread that
    logs. Destinations work on rank 0 only, unless `all_ranks` is true.
    """

    all_ranks: bool = False

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Take the run's parameters: a nested mapping of plain values."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Take names under which the run is found again."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take metrics of one step, as floats."""

    def log_records(self, records: Sequence[Record]) -> None:
        """Take many records at once; override it in place of `log_metrics` to have timestamps, or to write in bulk."""
        for record in records:
            self.log_metrics(record.metrics, record.step)

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Take a table of plain values."""

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        """Take images: uint8 arrays of shape (N, H, W, C) with C 1 or 3, on the CPU."""

    def log_sweep(self, summary: SweepSummary) -> None:
        """Take what is known of a sweep, in the process that leads it: before its first job, and when it has ended."""

    def find_run(self, run_id: str, downloads: Path | None) -> Path | None:
        """Return the folder of a run by its id here; None where there is no such run, or where runs have no ids.

        Args:
            run_id: as the destination shows it.
            downloads: an empty folder, to be filled with the run's record and returned when the run's own folder is not
                on this machine any more; None: only its own folder will do.

        Raises:
            ValueError: the run is known, but what is asked of it cannot be had.
        """
        return None

    def sync(self, run_dir: Path | None) -> bool | None:
        """Send what earlier runs left unsent, and print how it went for each.

        Args:
            run_dir: of one run; None: of all that this destination knows of.

        Returns:
            Whether nothing is left; None where there is never anything to send.

        Raises:
            ValueError: nothing was ever logged there.
        """
        return None

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Take a file that is complete at `path`; `name` is a folder in the destination, default its top."""
