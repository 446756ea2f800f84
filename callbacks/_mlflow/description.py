"""Describes a run for MLflow: its parameters, its data sets, and where it comes from. Standard library only."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner import State


# Keys that say how a run was started, not what it is: runs that differ only in these are the same experiment.
START_KEYS = (
    *("run_name", "resume", "rerun", "allow_targets", "allow_addresses", "skip_finished", "allow_divergence"),
    *("explain", "predict", "prove", "compare"),
)


def describe_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that define a run, so that a comparison of runs shows only how they differ."""
    return flatten({key: value for key, value in config.items() if key not in START_KEYS})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as `{"optimizer.lr": "0.1"}`, spelled as on the command line: null, true, [1, 2].

    Lists that contain mappings are flattened by index; other lists are one value.
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def describe_inputs(state: State) -> list[dict[str, Any]]:
    """Return descriptions of the run's data sets, as MLflow inputs."""
    loaders = [("train", state.train_dataloader), *((one.label, one.dataloader) for one in state.evaluators)]
    return [describe_dataset(loader, label, state.config.get("data")) for label, loader in loaders]


def describe_dataset(loader: Any, label: str, data_config: Any) -> dict[str, Any]:
    """Return a description of a data set as an MLflow input, as far as its loader tells.

    Args:
        loader: iterable of its batches.
        label: 'train', or the label of the evaluator.
        data_config: the part of the run's config that describes the data, or None.
    """
    dataset = getattr(loader, "dataset", loader)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    target = data_config.get("_target_") if isinstance(data_config, Mapping) else None
    sizes = {"num_rows": _length(dataset) if dataset is not loader else None, "num_batches": _length(loader)}
    return {
        "name": (target or kind).rpartition(".")[2],
        "context": label,
        "source": {"class": kind, **(flatten(data_config) if target else {})},
        "profile": {name: size for name, size in sizes.items() if size is not None},
    }


def origin_tags(command: Sequence[str], cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags for where a run comes from, which `MlflowClient.create_run` does not set itself.

    Args:
        command: command that the user typed, interpreter first.
        cwd: folder in which it was typed; the commit is that of the enclosing repository.
        run_dir: the run's folder.
    """
    command = [Path(command[0]).name, *command[1:]] if command else []
    tags = {
        "mlflow.source.name": shlex.join(command[1:]) or "python",
        "mlflow.source.type": "LOCAL",
        "command": shlex.join(command),
        "host": platform.node(),
        "python": platform.python_version(),
    }
    with contextlib.suppress(KeyError, OSError):  # a container's user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(PackageNotFoundError):  # a build from source may have no metadata
        tags["torch"] = version("torch")
    return tags | git_tags(cwd, run_dir)


def git_tags(cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags for the commit, the branch and whether the run's code differs; empty outside a repository.

    The code differs if tracked files are modified, or if the run keeps modules in `code/`, which are in no commit.
    """
    try:
        status = subprocess.run(
            ["git", "--no-optional-locks", "-C", cwd, "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    is_dirty = (run_dir / "code").is_dir() or any(not line.startswith("#") for line in status)
    heads = dict(line[2:].split(" ", 1) for line in status if line.startswith("# branch."))
    return {
        "mlflow.source.git.commit": heads["branch.oid"],
        "mlflow.source.git.branch": heads["branch.head"],
        "mlflow.source.git.dirty": str(is_dirty).lower(),
    }


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
