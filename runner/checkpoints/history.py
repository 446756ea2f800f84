"""Finds the checkpoint of a run that precedes a batch. Imports no torch until one is read."""

from __future__ import annotations

import os
from pathlib import Path

from runner.checkpoints.manifest import MANIFEST, read_manifest, saved_at
from runner.failures.errors import UnreadableCheckpoint
from runner.timing.time import Timestamp


def checkpoint_before(run_dir: Path, batch: int) -> Path | None:
    """Return the newest intact checkpoint before a batch, counted from 1; None for the beginning of the run."""
    from runner.checkpoints.files import verify

    found = {one: read_time(one).batch for one in _resumable(run_dir)}
    before = [one for one, trained in found.items() if trained < batch]
    newest_first = sorted(before, key=lambda one: (found[one], saved_at(one)), reverse=True)
    return next((one for one in newest_first if verify(one) is None), None)


def read_time(checkpoint: Path) -> Timestamp:
    """Return the time of training of a checkpoint, the beginning if its manifest cannot be read."""
    try:
        return read_manifest(checkpoint).timestamp
    except (FileNotFoundError, UnreadableCheckpoint):
        return Timestamp()


def _resumable(run_dir: Path) -> set[Path]:
    """Return the checkpoints that belong to a run and hold more than weights."""
    found = {Path(os.path.realpath(one)).parent for one in run_dir.glob(f"[!.]*/[!.]*/{MANIFEST}")}
    return {one for one in found if (one / "state.pt").is_file()}
