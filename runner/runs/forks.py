"""Forks: new runs that start from the state of another one, and record their parent."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.checkpoints.history import checkpoint_before, read_time
from runner.config.command_line import typed_value
from runner.distributed.environment import is_rank_zero
from runner.distributed.job import Job
from runner.failures.facts import WrongKey
from runner.files.whole import link_or_copy, read_object

PARENT = "runner.parent"
"""The tag with the folder of the parent."""
FORKED_AT = "runner.forked_at"
"""The tag with the batch after which a fork begins."""
FOLDER = "fork"
"""The subfolder of a fork's folder that holds the checkpoint it began with, whatever becomes of the parent's."""


def fork_batch(arguments: Sequence[str]) -> int | None:
    """Return the batch that `at=` names; None without it, or if it is no batch, which is refused later."""
    found = re.fullmatch(r"(?:ba)?(\d{1,12})(?:ba)?", typed_value(arguments, "at") or "")
    return int(found[1]) if found else None


def find_fork(config: Mapping[str, Any], run_dir: str | None) -> tuple[str | None, dict[str, str]] | None:
    """Return the parent's last checkpoint up to where a fork begins, and the tags that name the parent.

    Returns:
        None if it is no fork. The checkpoint is None if the parent has none so early.
    """
    if config["at"] is None:
        return None
    given = repr(config["at"])
    if config["resume"] is None or run_dir is None:
        raise WrongKey("at", "starts a new run from another one; name it with resume=<its folder>", given)
    batch = fork_batch([f"at={config['at']}"])
    if batch is None or batch < 1:
        raise WrongKey("at", "must be the number of a batch, such as ba1200", given)
    checkpoint = checkpoint_before(Path(run_dir), batch + 1)
    tags = {PARENT: run_dir, FORKED_AT: str(batch)}
    run_id = read_object(Path(run_dir) / "mlflow" / "sent.json").get("run_id")
    if re.fullmatch(r"[0-9a-f]{32}", str(run_id)):
        tags["mlflow.parentRunId"] = str(run_id)  # MLflow shows the fork below its parent
    return (None if checkpoint is None else str(checkpoint)), tags


def planted(job: Job) -> dict[str, Any]:
    """Return a config that resumes from a checkpoint in the fork's own folder, if it is a fork. All ranks.

    Where the parent has a checkpoint of that batch, it is a copy, which shares its blocks on the disk with the original
    where the file system can do that. Otherwise the batches after the parent's last checkpoint are retrained. It stays
    when the parent deletes old checkpoints, or is deleted itself.

    Raises:
        WrongKey: the parent has no such batch.
        OSError: the checkpoint cannot be written.
    """
    config = job.config
    run_dir = Path(job.run_dir)
    source = None if config["resume"] is None else Path(config["resume"])
    if config["at"] is None or (source is not None and source.is_relative_to(run_dir)):
        return config
    batch = int(job.tags[FORKED_AT])
    if source is None or read_time(source).batch != batch:
        from runner.modes.retraining.trunk import train_trunk  # imports torch

        path = train_trunk(job, Path(job.tags[PARENT]), batch, run_dir / FOLDER / f"ba{batch}")
        return {**config, "resume": str(path)}
    copy = run_dir / FOLDER / source.name
    if is_rank_zero() and not copy.exists():
        partial = copy.with_name(f".{copy.name}.partial-{os.getpid()}")
        shutil.copytree(source, partial, copy_function=link_or_copy)
        partial.rename(copy)
    return {**config, "resume": str(copy)}
