"""What a run keeps of how it was made: config, overrides, versions, hardware, commit and uncommitted changes."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

PACKAGES = ("torch", "hydra-core", "omegaconf", "torchmetrics", "mlflow", "numpy")


def write_record(run_dir: Path, config: dict[str, Any], overrides: list[str]) -> list[Path]:
    """Write a run's record into its folder, and return the files. Rank 0.

    Args:
        run_dir: made where it does not exist.
        config: the resolved config.
        overrides: as typed on the command line.

    Raises:
        OSError: the folder cannot be written to.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    files = {
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "overrides.yaml": yaml.safe_dump(overrides),
        "environment.json": json.dumps(environment(), indent=1),
    }
    patch = _git("diff", "HEAD")
    if patch:
        files["git.patch"] = patch + "\n"
    for name, text in files.items():
        (run_dir / name).write_text(text)
    return [run_dir / name for name in files]


def environment() -> dict[str, Any]:
    """Return versions, hardware, command and commit, as plain values."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "command": shlex.join([Path(sys.executable).name, "-m", "runner", *sys.argv[1:]]),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git_commit": _git("rev-parse", "HEAD"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Return what git says about the working directory, None where it is no repository or git is missing."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
