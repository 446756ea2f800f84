"""What a run says of itself in MLflow: its parameters, flat, and its data sets. Standard library only."""

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


# How a run was asked for: runs that differ in nothing else are the same experiment.
ASKED = (
    *("run_name", "resume", "rerun", "allow_targets", "allow_addresses", "skip_finished", "allow_divergence"),
    *("explain", "predict", "prove", "compare"),
)


def describe_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's parameters: what defines it, so that comparing runs shows only how they differ."""
    return flatten({key: value for key, value in config.items() if key not in ASKED})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as `{"optimizer.lr": "0.1"}`, spelled as on the command line: null, true, [1, 2].

    Lists with mappings in them are flattened by index; other lists are one value.
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
    """The data sets of a run, as inputs of it."""
    loaders = [("train", state.train_dataloader), *((one.label, one.dataloader) for one in state.evaluators)]
    return [describe_dataset(loader, label, state.config.get("data")) for label, loader in loaders]


def describe_dataset(loader: Any, label: str, data_config: Any) -> dict[str, Any]:
    """A data set as an input of a run, as far as its loader tells.

    Args:
        loader: yields its batches.
        label: 'train', or the evaluator's.
        data_config: the run's config of its data, or None.
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
    """Return tags that MLflow's own `create_run` leaves out.

    Args:
        command: what the user typed, the interpreter first.
        cwd: where it was typed; the commit is that of the repository around it.
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
    with contextlib.suppress(KeyError, OSError):  # a container may run under a number without a name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(PackageNotFoundError):  # a build from source may leave no metadata
        tags["torch"] = version("torch")
    return tags | git_tags(cwd, run_dir)


def git_tags(cwd: str, run_dir: Path) -> dict[str, str]:
    """Return commit, branch and whether the run's code differs from the commit; empty outside of a repository.

    It does where tracked files do, and where the run keeps modules in `code/`, which no commit holds.
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
