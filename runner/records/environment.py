"""Versions, hardware and commit, on which numbers may depend: those of now, and how a record's differ from them."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from runner.config.composed import targets
from runner.files.printable import printable
from runner.records.patch import git_commit

AFFECTING = ("ranks", "threads", "gpus", "git_commit", "packages", "python", "platform", "host", "cpus")
"""The facts of an environment that may change numbers, the most likely one first."""

PACKAGES = ("torch", "hydra-core", "omegaconf", "torchmetrics", "mlflow", "numpy")
IMPORTED = ("torchvision", "timm", "transformers", "tokenizers", "datasets", "peft")  # recorded where they are in use


def packages_of(config: Mapping[str, Any]) -> list[str]:
    """Return the packages on which the numbers of a run may depend, with those whose classes its config names."""
    own = {str(section["_target_"]).partition(".")[0] for _, section in targets(config)}
    return [*dict.fromkeys([*PACKAGES, *(name for name in IMPORTED if name in sys.modules), *sorted(own - {"runner"})])]


def environment(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return versions, hardware and commit, as plain values."""
    import torch

    from runner.distributed.ranks import get_world_size

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "ranks": get_world_size(),
        "packages": {name: recorded for name in packages if (recorded := _version(name))},
        "git_commit": git_commit(),
    }


def affecting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of an environment that may change numbers."""
    return {key: environment[key] for key in AFFECTING if key in environment}


def differences(recorded: Mapping[str, Any]) -> list[str]:
    """Return lines about what differs from a recorded environment and affects results: the commit and versions."""
    lines = []
    commit = git_commit()
    before = printable(recorded.get("git_commit") or "")[:10]
    if before and commit and before != commit[:10]:
        lines.append(f"the run was made at git commit {before}, this is {commit[:10]}")
    packages = recorded.get("packages")
    versions = [
        printable(f"{name} {version_then}, now {_version(name)}")
        for name, version_then in (packages if isinstance(packages, dict) else {}).items()
        if version_then != _version(name)
    ]
    if versions:
        lines.append(f"the run was made with {'; '.join(versions)}: numbers may differ")
    return lines


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):  # no name at all
        return None
