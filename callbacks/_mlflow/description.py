"""Describes a run for MLflow: its parameters, in a few words, and where it comes from. Standard library only."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

from runner.files.git import git, root_of, submodules

# Keys for how a run was started: runs that differ only in these are the same experiment.
START_KEYS = (
    *("run_name", "experiment_name", "mode", "resume", "resume_allow", "at", "rerun", "run", "allow_targets"),
    *("allow_code", "allow_addresses", "skip_finished", "allow_divergence", "predict", "prove"),
    *("replay", "verify", "lr_range", "compare", "init", "output"),
)
PLUMBING = (
    "trainer",
    "launch",
    "callbacks",
)  # sections that become parameters only where they differ from the defaults
OWN_CLASSES = ("runner.", "torch.")  # modules whose classes are represented by the name of the config choice


def describe_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that define a run, so that a list of runs can be filtered by their differences.

    Of the trainer, the launch and the callbacks, these are the arguments that differ from the defaults of their
    classes; of everything else, all values but null and empty ones, copies of the seed, the runner's own classes, and
    the usual places of inputs and targets in a batch. Keys that were typed are logged with the run's record.
    """
    kept = {key: value for key, value in config.items() if key not in START_KEYS}
    if algorithms := kept.get("algorithms"):
        kept["algorithms"] = {"": ", ".join(algorithms), **algorithms}
    for section in PLUMBING:
        if isinstance(kept.get(section), Mapping):
            kept[section] = _changed(kept[section])
    if isinstance(loggers := kept.get("callbacks"), Mapping):
        kept["callbacks"] = {key: value for key, value in loggers.items() if key != "mlflow_logger"}
    return {key: value for key, value in flatten(kept).items() if not _says_nothing(key, value, config.get("seed"))}


def _changed(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section that differ from the defaults of the class or classes that it names."""
    nested = {key: _changed(value) for key, value in section.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in section.items() if key not in nested}
    module, _, name = str(section.get("_target_", "")).rpartition(".")
    try:
        known = signature(getattr(sys.modules.get(module), name)).parameters
    except (AttributeError, TypeError, ValueError):
        return plain | nested
    return {key: value for key, value in (plain | nested).items() if key not in known or known[key].default != value}


def _says_nothing(key: str, value: str, seed: Any) -> bool:
    name = key.rpartition(".")[2]
    is_copy = name == "seed" and key != "seed" and value == str(seed)
    is_own = name == "_target_" and value.startswith(OWN_CLASSES)
    is_usual = (name.endswith("_key") and value in ("0", "1")) or (key, value) == ("init_weights", "in_order")
    is_plumbing = name in ("_partial_", "_convert_", "_recursive_")
    return is_copy or is_own or is_usual or is_plumbing or value in ("null", "{}", "[]", "")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as `{"optimizer.lr": "0.1"}`, spelled as on the command line: null, true, [1, 2].

    Lists that contain mappings are flattened by index; other lists are one value.
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}" if key != "" else prefix.removesuffix(".")
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def origin_tags(command: Sequence[str], cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags for where a run comes from, which `MlflowClient.create_run` does not set itself.

    The command begins with the interpreter; the commit is that of the repository around `cwd`.
    """
    tags = {
        "mlflow.source.name": show_command(command),
        "mlflow.source.type": "JOB",  # of a LOCAL one, the UI shows what follows the last slash
        "host": platform.node(),
        "python": platform.python_version(),
    }
    with contextlib.suppress(KeyError, OSError):  # a container's user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(PackageNotFoundError):  # a build from source may have no metadata
        tags["torch"] = version("torch")
    return tags | git_tags(cwd, run_dir)


def show_command(command: Sequence[str]) -> str:
    """Return a command as it was typed, without the folders of the interpreter and of the `runner` script."""
    program = command[1:] if command[1:] and Path(command[1]).name == "runner" else command
    return shlex.join([Path(one).name if index == 0 else one for index, one in enumerate(program)]) or "python"


def git_tags(cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags for the commit, the branch and whether the run's code differs; empty outside a repository.

    The code differs if tracked files are modified, or if the run keeps modules in `code/`, which are in no commit.
    """
    state = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
    try:
        status = git(*state, folder=cwd).decode(errors="replace").splitlines()
        inside = [git("status", "--porcelain", *state[3:], folder=one) for one in submodules(root_of(cwd))]
    except (OSError, subprocess.SubprocessError):
        return {}
    is_dirty = (run_dir / "code").is_dir() or any(inside) or any(not line.startswith("#") for line in status)
    heads = dict(line[2:].split(" ", 1) for line in status if line.startswith("# branch."))
    return {
        "mlflow.source.git.commit": heads["branch.oid"],
        "mlflow.source.git.branch": heads["branch.head"],
        "mlflow.source.git.dirty": str(is_dirty).lower(),
    }
