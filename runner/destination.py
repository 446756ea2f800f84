"""Where logged values go. Imports no torch, so that a destination can start its helpers before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Take a file that is complete at `path`; `name` is a folder in the destination, default its top."""
