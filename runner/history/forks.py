"""Forks: new runs that start from the state of another one, and record their parent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.checkpoints.history import checkpoint_before
from runner.cli.command_line import typed_value
from runner.failures.facts import WrongKey
from runner.files.whole import read_object
from runner.records.recording import FORKED_AT, PARENT


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
