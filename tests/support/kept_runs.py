"""Small runs of the whole application, and the files that they leave."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("trainer.max_duration=2ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")
QUIET = ("callbacks=[checkpoint_saver]",)
LONGER = "trainer.max_duration=3ep"
CLEAN = {"model": {"_target_": "runner.ClassificationModel", "module": {"_target_": "runner.models.MLP"}}}
"""Overrides for which a record needs no permission."""


def git(folder: Path, *arguments: str) -> str:
    """The output of a git command in a folder."""
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def weights(run_dir: Path, checkpoint: str = "ep2-ba6") -> str:
    """A hash of the weights in a checkpoint."""
    return hashlib.sha256((run_dir / "checkpoints" / checkpoint / "model.pt").read_bytes()).hexdigest()


def tree(run_dir: Path) -> dict[str, int]:
    """Everything in a folder, with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*")}


def folders(folder: Path) -> set[Path]:
    """Folders of runs that were made under a working directory."""
    return set(folder.glob("outputs/20*/*"))


def status(run: Path) -> str:
    """The result that a run has written."""
    return json.loads((run / "result.json").read_text())["status"]


def foreign_run(folder: Path, config: Any, overrides: Sequence[str]) -> Path:
    """A run's folder as if another user had made it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CLEAN | config))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([*overrides]))
    return folder
