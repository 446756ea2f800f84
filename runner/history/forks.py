"""Forks: new runs that start from the state of another run and record it as their parent."""

from __future__ import annotations

import re
from pathlib import Path

from runner.checkpoints.history import checkpoint_before
from runner.cli.command import Command, batch_of
from runner.failures.errors import WrongKey
from runner.files.whole import read_object
from runner.records.recording import FORKED_AT, PARENT


def find_fork(command: Command, run_dir: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the parent's last checkpoint at or before the batch of a fork, and the tags that name the parent.

    The checkpoint is None if the parent saved none that early.
    """
    if run_dir is None:
        raise WrongKey("RUN", "has no folder here to start a fork from; give the run's folder", repr(command.run))
    batch = batch_of(command.batch) or 1
    checkpoint = checkpoint_before(Path(run_dir), batch + 1)
    tags = {PARENT: run_dir, FORKED_AT: str(batch)}
    run_id = read_object(Path(run_dir) / "mlflow" / "sent.json").get("run_id")
    if re.fullmatch(r"[0-9a-f]{32}", str(run_id)):
        tags["mlflow.parentRunId"] = str(run_id)  # MLflow shows the fork below its parent
    return (None if checkpoint is None else str(checkpoint)), tags
