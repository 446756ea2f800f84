"""Overrides for small runs of the whole application, and functions that read the files in their folders."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from runner.timing.time import Timestamp

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("trainer.max_duration=2ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")
QUIET = ("callbacks=[checkpoint_saver]",)
LONGER = "trainer.max_duration=3ep"
CLEAN = {"model": {"_target_": "runner.ClassificationModel", "module": {"_target_": "runner.models.MLP"}}}
"""A config whose classes are all trusted, so that no permission is needed to use the record."""


def git(folder: Path, *arguments: str) -> str:
    """Run a git command in a folder, and return its output."""
    author = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    process = subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return process.stdout.strip()


def weights(run_dir: Path, checkpoint: str = "ep2-ba6") -> str:
    """Return a hash of the weights in a checkpoint."""
    return hashlib.sha256((run_dir / "checkpoints" / checkpoint / "model.pt").read_bytes()).hexdigest()


def tree(run_dir: Path) -> dict[str, int]:
    """Return the path of everything in a folder, with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*")}


def folders(folder: Path) -> set[Path]:
    """Return the folders of all runs below a working directory."""
    return set(folder.glob("outputs/20*/*"))


def status(run: Path) -> str:
    """Return the status in the result file of a run."""
    return json.loads((run / "result.json").read_text())["status"]


def write_manifest(run: Path, name: str, seconds: int) -> Path:
    """Write a checkpoint that has only a manifest, saved `seconds` after 1970, and return its folder."""
    manifest = run / "checkpoints" / name / "manifest.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    files = {"model.pt": {"size": 0, "sha256": ""}}
    content = {"format": 1, "saved_at": seconds, "timestamp": Timestamp().state_dict(), "files": files}
    manifest.write_text(json.dumps(content))
    os.utime(manifest, (seconds, seconds))
    os.utime(run / "checkpoints", (seconds, seconds))
    return manifest.parent


def foreign_run(folder: Path, config: Any, overrides: Sequence[str]) -> Path:
    """Write a run's folder as if another user had made it, and return it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CLEAN | config))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([*overrides]))
    return folder
