"""Finds the session of a run that trained a given batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.files.addresses import without_credentials
from runner.files.whole import read_object

if TYPE_CHECKING:
    from runner.records.job import Job

ENVIRONMENT = "environment.json"
VERB = "verb"
"""In a session's environment: the verb of its command."""
FROM_CHECKPOINT = "from_checkpoint"
"""In a session's environment: the checkpoint with which the session began; null at the beginning of a run."""
FROM_BATCH = "from_batch"
"""In a session's environment: the batch after which the session began."""
SESSIONS = "sessions"


def given_run(job: Job) -> str:
    """Return the run of a job as it was typed, without credentials."""
    return without_credentials(str(job.command.run))


def record_of(run_dir: Path, batch: int) -> Path:
    """Return the folder with the record of the session that trained a batch of the run as it stands now.

    A run may be resumed from an earlier checkpoint; batches that were trained after it earlier no longer belong to the
    run.
    """
    records = _records(run_dir)
    begun = [one for one in records if began_after(one) < batch]
    return (begun or records[:1])[-1]


def forked_after(run_dir: Path) -> int:
    """Return the batch of its parent after which a fork begins, 0 for any other run.

    Earlier batches were trained with the parent's config, so a fork cannot be retrained from the start.
    """
    first = _records(run_dir)[0]
    return began_after(first) if read_object(first / ENVIRONMENT).get(VERB) == "fork" else 0


def _records(run_dir: Path) -> list[Path]:
    """Return the folders with the records of a run's sessions, in order; the run's own if it has none."""
    earlier = sorted(
        (one for one in run_dir.glob(f"{SESSIONS}/[0-9]*") if one.name.isdigit()), key=lambda one: int(one.name)
    )
    return [one for one in (*earlier, run_dir) if (one / "config.yaml").is_file()] or [run_dir]


def began_after(record: Path) -> int:
    """Return the batch after which the session of a record began; 0 if it began the run."""
    found = read_object(record / ENVIRONMENT).get(FROM_BATCH)
    return found if isinstance(found, int) else 0
