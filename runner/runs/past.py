"""Where a batch lies in a run's past: the session that trained it, and the checkpoint before it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.command_line import typed_value
from runner.files.whole import read_object

if TYPE_CHECKING:
    from runner.distributed.job import Job
    from runner.time import Timestamp

ENVIRONMENT = "environment.json"
FROM_BATCH = "from_batch"
"""In a session's environment: the batch after which the session began."""
SESSIONS = "sessions"
MANIFEST = "manifest.json"  # of a checkpoint, as in `runner.checkpoints.files`, which imports torch


def given_run(job: Job) -> str:
    """Return the run of a job as `run=` names it."""
    return typed_value(job.overrides, "run") or str(job.config["run"])


def record_of(run_dir: Path, batch: int) -> Path:
    """Return the folder with the record of the session that trained a batch, as the run goes on from it.

    A run may be resumed from an earlier checkpoint; what was trained after that before is no part of it any more.

    Args:
        run_dir: the run's folder.
        batch: number of the batch, from 1.
    """
    earlier = sorted(
        (one for one in run_dir.glob(f"{SESSIONS}/[0-9]*") if one.name.isdigit()), key=lambda one: int(one.name)
    )
    records = [one for one in (*earlier, run_dir) if (one / "config.yaml").is_file()]
    begun = [one for one in records if began_after(one) < batch]
    return (begun or records[:1] or [run_dir])[-1]


def began_after(record: Path) -> int:
    """Return the batch after which the session of a record began; 0 if it began the run."""
    found = read_object(record / ENVIRONMENT).get(FROM_BATCH)
    return found if isinstance(found, int) else 0


def checkpoint_before(run_dir: Path, batch: int) -> Path | None:
    """Return the newest intact checkpoint from which a batch can be trained again; None for the beginning of the run.

    Args:
        run_dir: the run's folder.
        batch: number of the batch, from 1.
    """
    from runner.checkpoints.files import saved_at, verify

    found = {one: read_time(one).batch for one in _resumable(run_dir)}
    before = [one for one, trained in found.items() if trained < batch]
    newest_first = sorted(before, key=lambda one: (found[one], saved_at(one)), reverse=True)
    return next((one for one in newest_first if verify(one) is None), None)


def last_saved(run_dir: Path) -> int | None:
    """Return the batch of the last of a run's checkpoints; None if there is none."""
    return max(saved_batches(run_dir), default=None)


def saved_batches(run_dir: Path) -> list[int]:
    """Return the batches after which a run has checkpoints that it can be resumed from, in order."""
    return sorted({read_time(one).batch for one in _resumable(run_dir)})


def read_time(checkpoint: Path) -> Timestamp:
    """Return the time of training of a checkpoint, the beginning if its manifest cannot be read."""
    from runner.checkpoints.snapshot import read_timestamp
    from runner.time import Timestamp

    try:
        return read_timestamp(checkpoint)
    except (OSError, ValueError, LookupError, TypeError):
        return Timestamp()


def _resumable(run_dir: Path) -> set[Path]:
    """Return the checkpoints that belong to a run and hold more than weights."""
    found = {one.resolve().parent for one in run_dir.glob(f"[!.]*/[!.]*/{MANIFEST}")}
    return {one for one in found if (one / "state.pt").is_file()}
