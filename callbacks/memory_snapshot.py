"""Writes snapshots of GPU memory that show what allocated it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner import Callback, Time
from runner.callbacks import _memory_history
from runner.failures.checks import check_whole, parse_interval
from runner.failures.errors import wrong_argument

if TYPE_CHECKING:
    from runner import Logger, State


class MemorySnapshot(Callback):
    """Writes torch's snapshots of CUDA memory at an interval, for pytorch.org/memory_viz.

    From FIT_START on, torch records each allocation and free with its Python stack. Every rank writes snapshots to
    `memory_snapshot/rank{rank}-ba{batch}.pickle` in the run's folder; a snapshot contains the newest records and all
    memory in use. A file may take a few KB per entry, so it is not logged as an artifact. If the model is not on CUDA,
    this warns and does nothing.

    Args:
        interval: how often to write a snapshot, as a time string or a number of epochs.
        max_entries: number of allocations and frees to remember, at least 1.
        keep: number of newest files to keep per rank, at least 1; -1 keeps all.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, interval: str | int | Time = "100ba", max_entries: int = 100_000, keep: int = 3) -> None:
        self.interval = parse_interval("interval", interval, "100ba")
        if isinstance(keep, bool) or not isinstance(keep, int) or (keep < 1 and keep != -1):
            raise wrong_argument("keep", keep, "must be a number of files, at least 1, or -1 for all")
        check_whole("max_entries", max_entries, 1)
        self.max_entries = max_entries
        self.keep = keep
        self._files: list[Path] = []  # written by this process, oldest first
        self._is_recording: bool | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._is_recording is None:
            self._is_recording = _memory_history.start(self, self.max_entries, state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if not self._is_recording:
            return
        if state.is_due(self.interval):
            path = _memory_history.write(self, state)
            self._files += [path] if path is not None else []
            while 0 < self.keep < len(self._files):
                self._files.pop(0).unlink(missing_ok=True)

    epoch_end = batch_end

    def close(self, state: State, logger: Logger) -> None:
        _memory_history.stop(self)
