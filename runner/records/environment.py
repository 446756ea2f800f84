"""Describes the versions, hardware and commit that numbers may depend on, and compares them with a record."""

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
"""Facts about an environment that may change numbers, most likely first."""

PACKAGES = ("torch", "hydra-core", "omegaconf", "torchmetrics", "mlflow", "numpy")
IMPORTED = ("torchvision", "timm", "transformers", "tokenizers", "datasets", "peft")  # recorded if imported


def packages_of(config: Mapping[str, Any]) -> list[str]:
    """Return the packages that a run's numbers may depend on, including those of classes that its config names."""
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
    """Return the facts about an environment that may change numbers."""
    return {key: environment[key] for key in AFFECTING if key in environment}


def differences(recorded: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference from a recorded environment that may affect results: commit and versions."""
    lines = []
    commit = git_commit()
    before = printable(recorded.get("git_commit") or "")[:10]
    if before and commit and before != commit[:10]:
        lines.append(f"the run was made at git commit {before}; this is {commit[:10]}")
    packages = recorded.get("packages")
    versions = [
        printable(f"{name} {recorded_version}, now {_version(name)}")
        for name, recorded_version in (packages if isinstance(packages, dict) else {}).items()
        if recorded_version != _version(name)
    ]
    if versions:
        lines.append(f"the run was made with {'; '.join(versions)}: numbers may differ")
    return lines


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except (PackageNotFoundError, ValueError):  # the name may be empty
        return None
