"""Logger destinations. Imports no torch, so that a destination can start its helpers before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.core.hooks import Callback
from runner.timing.time import Timestamp


class MetricRecord(NamedTuple):
    """Metrics that were logged together; after they are read back from the device, all values are floats."""

    metrics: dict[str, Any]
    step: int
    """Batches trained when the record was logged, including the batch that it describes."""
    timestamp: Timestamp
    wall_time: float
    """Seconds since the Unix epoch."""


@dataclass(frozen=True)
class SweepSummary:
    """The results of a sweep.

    Attributes:
        folder: the sweep's folder.
        sweep: the sweep's id, with which its jobs are tagged as `runner.sweep`.
        name: the sweep's name, made of the swept keys.
        status: RUNNING before the first job, then FINISHED, FAILED, or KILLED by a signal.
        tables: columns and rows by table name: the jobs, best first, and means over jobs that differ only in the seed.
        best: facts about the best job, by name.
        metrics: metrics of the sweep as a whole, by key.
        files: tables and plots in the sweep's folder.
    """

    folder: Path
    sweep: str
    name: str
    status: str
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] = field(default_factory=dict[str, Any])
    best: Mapping[str, str] = field(default_factory=dict[str, str])
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    files: Sequence[Path] = ()


class LoggerDestination(Callback):
    """Base of the callbacks that receive logged values; every method is optional.

    Metrics arrive on a background thread, in order, as Python floats. Everything else arrives on the thread that logs
    it. Destinations are active on rank 0 only, unless `all_ranks` is true.
    """

    all_ranks: bool = False

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Record the run's hyperparameters: a nested mapping of plain values."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Record tags by which the run can be found later."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step, as floats."""

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        """Record a batch of records; override this instead of `log_metrics` to get timestamps or write in bulk."""
        for record in records:
            self.log_metrics(record.metrics, record.step)

    def log_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Record a table of plain values."""

    def log_images(self, images: Any, name: str, step: int, captions: Sequence[str] | None = None) -> None:
        """Record images: a uint8 array of shape (N, H, W, C) with N at least 1, and C 1 or 3."""

    def log_sweep(self, summary: SweepSummary) -> None:
        """Record a sweep's summary; called by the process that leads the sweep, before its first job and at its end."""

    def find_run(self, run_id: str, downloads: Path | None) -> Path | None:
        """Return the folder of the run with a given id; None if this destination has no such run, or gives no ids.

        Args:
            run_id: the id as the destination displays it.
            downloads: an empty folder. If the run's own folder is no longer on this machine, the destination downloads
                the run's record into this one and returns it. None: nothing is downloaded.

        Raises:
            ValueError: the run exists, but neither its folder nor the requested download is available.
        """
        return None

    def sync(self, run_dir: Path | None) -> bool | None:
        """Send everything that earlier runs could not send, and print the outcome for each run.

        Args:
            run_dir: the folder of one run; None: all runs that this destination knows of.

        Returns:
            Whether everything has been sent; None if this destination never defers sending.

        Raises:
            ValueError: nothing was ever logged in the folder.
        """
        return None

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Record the complete file at `path` in the destination's folder `name`, by default its top level."""
