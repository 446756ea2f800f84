"""Find the checkpoint of a run that precedes a batch. torch is imported only to read one."""

from __future__ import annotations

import os
from pathlib import Path

from runner.checkpoints.manifest import MANIFEST, read_manifest, saved_at
from runner.failures.errors import UnreadableCheckpoint
from runner.timing.time import Timestamp


def checkpoint_before(run_dir: Path, batch: int) -> Path | None:
    """Return the newest intact checkpoint before a batch, counted from 1; None if only the run's start precedes it."""
    from runner.checkpoints.files import verify

    batches = {checkpoint: read_time(checkpoint).batch for checkpoint in _resumable(run_dir)}
    earlier = [checkpoint for checkpoint, trained in batches.items() if trained < batch]
    newest_first = sorted(earlier, key=lambda checkpoint: (batches[checkpoint], saved_at(checkpoint)), reverse=True)
    return next((checkpoint for checkpoint in newest_first if verify(checkpoint) is None), None)


def read_time(checkpoint: Path) -> Timestamp:
    """Return the training time of a checkpoint, or the beginning if its manifest cannot be read."""
    try:
        return read_manifest(checkpoint).timestamp
    except (FileNotFoundError, UnreadableCheckpoint):
        return Timestamp()


def _resumable(run_dir: Path) -> set[Path]:
    """Return the checkpoints of a run that hold more than weights."""
    checkpoints = {Path(os.path.realpath(file)).parent for file in run_dir.glob(f"[!.]*/[!.]*/{MANIFEST}")}
    return {checkpoint for checkpoint in checkpoints if (checkpoint / "state.pt").is_file()}
