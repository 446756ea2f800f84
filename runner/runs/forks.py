"""Forks: runs of their own that begin where another one stood, and know their parent."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.command_line import typed_value
from runner.distributed.environment import is_rank_zero
from runner.failures.facts import WrongKey
from runner.files.whole import read_object
from runner.runs.past import checkpoint_before, read_time, saved_batches

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


def find_fork(config: Mapping[str, Any], run_dir: str | None) -> tuple[Path, dict[str, str]] | None:
    """Return the checkpoint at which a fork begins, and the tags that name its parent; None if it is no fork.

    Args:
        config: the composed config, with `at` and `resume`.
        run_dir: the folder of the run that `resume` names.

    Raises:
        WrongKey: `at` is no batch, or the run has no checkpoint there.
    """
    if config["at"] is None:
        return None
    given = repr(config["at"])
    if config["resume"] is None or run_dir is None:
        raise WrongKey("at", "begins a run where another one stood; name that one with resume=<its folder>", given)
    batch = fork_batch([f"at={config['at']}"])
    if batch is None or batch < 1:
        raise WrongKey("at", "must be the number of a batch, such as ba1200", given)
    checkpoint = checkpoint_before(Path(run_dir), batch + 1)
    if checkpoint is None or read_time(checkpoint).batch != batch:
        kept = ", ".join(f"ba{one}" for one in saved_batches(Path(run_dir))) or "none"
        more = "callbacks.checkpoint_saver.keep=-1 keeps all"
        raise WrongKey("at", f"this run has no checkpoint after that batch; it has {kept} ({more})", given)
    tags = {PARENT: run_dir, FORKED_AT: str(batch)}
    run_id = read_object(Path(run_dir) / "mlflow" / "sent.json").get("run_id")
    if re.fullmatch(r"[0-9a-f]{32}", str(run_id)):
        tags["mlflow.parentRunId"] = str(run_id)  # MLflow shows the fork below its parent
    return checkpoint, tags


def planted(config: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return a config that resumes from a copy in the fork's own folder, if it is a fork; rank 0 makes the copy.

    The copy shares its blocks on the disk with the original where the file system can do that. It stays when the parent
    deletes old checkpoints, or is deleted itself.

    Args:
        config: the config of a run, in which `resume` names the checkpoint if it is a fork.
        run_dir: the folder of the run.

    Raises:
        OSError: the copy cannot be made.
    """
    if config["at"] is None or Path(config["resume"]).is_relative_to(run_dir):
        return config
    source = Path(config["resume"])
    copy = run_dir / FOLDER / source.name
    if is_rank_zero() and not copy.exists():
        partial = copy.with_name(f".{copy.name}.partial-{os.getpid()}")
        shutil.copytree(source, partial, copy_function=link_or_copy)
        partial.rename(copy)
    return {**config, "resume": str(copy)}


def link_or_copy(source: str, target: str) -> None:
    """Make a file that shares its blocks on the disk with another, or a copy of it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:  # on another file system, or on one without links
        shutil.copyfile(source, target)
