"""Describes a run for MLflow: its parameters, command, data sets and origin, and a description in words.

Importing it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.callbacks._run_description import describe_run
from runner.files.git import git, root_of, submodules
from runner.terminal.commands import typed

if TYPE_CHECKING:
    from torch import Tensor

    from runner import State

# Runs that differ only in these keys are the same experiment.
START_KEYS = ("run_name", "experiment_name")
PLUMBING = ("trainer", "launch", "callbacks")  # sections of which only values that are no defaults become parameters
OWN_CLASSES = ("runner.", "torch.")  # modules whose classes are represented by the name of the config choice
NO_LIMIT = 10_000  # columns


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


def typed_command() -> list[str]:
    """Return the command as the user typed it, interpreter first; in a job of a launcher, the sweep's command."""
    return [sys.orig_argv[0], "-m", "runner", *typed] if typed else sys.orig_argv


def note_command() -> str:
    """Return the command in Markdown. A block of code, which MLflow does not wrap, would push values off the page."""
    return f"`` {show_command(typed_command())} ``"


def typed_overrides() -> dict[str, str]:
    """Return the values that the user typed, by key, except those that only control how the command runs."""
    matches = (re.fullmatch(r"[+~]{0,2}([\w./]+)=(.*)", word, re.DOTALL) for word in typed_command())
    ways = {"hydra", "callbacks", "launch", *START_KEYS}
    return {match[1]: match[2] for match in matches if match and re.split("[./]", match[1])[0] not in ways}


def describe_beginning(state: State) -> list[dict[str, Any]]:
    """Return entries of the spool on a run's size, checkpoints, data sets, description and columns of the UI's list."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in state.unwrapped_model.parameters()]
    total = sum(size for size, _ in sizes)
    trainable = sum(size for size, is_trained in sizes if is_trained)
    params = {"model.num_parameters": str(total)}
    if trainable < total:
        params["model.num_trainable"] = str(trainable)
    savers: list[Any] = [callback for callback in state.callbacks if hasattr(callback, "best_checkpoint")]
    tags = {"runner.checkpoints": str(Path(state.run_dir).resolve() / savers[0].folder)} if savers else {}
    loaders = [("train", state.train_dataloader), *((one.label, one.dataloader) for one in state.evaluators)]
    inputs = [describe_dataset(loader, label, state.config.get("data")) for label, loader in loaders]
    data = ", ".join(dict.fromkeys(described["name"] for described in inputs))
    note = [note_command(), *describe_run(state, width=NO_LIMIT), f"Data: {data}"]
    return [
        {"params": params},
        {"tags": tags},
        *({"input": described} for described in inputs),
        {"note": "\n\n".join(note)},
        {"view": _columns(state)},
    ]


def _columns(state: State) -> list[str]:
    """Return the columns of the list of runs: the values of evaluations, and the keys that were typed."""
    columns = []
    for evaluator in state.evaluators:
        label = evaluator.label
        names = state.eval_metrics.get(label, {})
        keys = [*(f"metrics/{label}/{name}" for name in names), f"loss/{label}/total"]
        columns += [f"metrics.`{key}`" for key in (*keys, *(f"best/{label}/{name}" for name in names))]
    return columns + [f"params.`{key}`" for key in dict.fromkeys(["model", *typed_overrides()])]


def describe_dataset(loader: Any, label: str, data_config: Any) -> dict[str, Any]:
    """Return a description of a data set as an MLflow input, as far as its loader provides one.

    Runs whose data has the same content share a data set in MLflow, so it says nothing of batches.
    """
    from runner.data.content import count_rows, digest, held_tensors

    dataset = getattr(loader, "dataset", loader)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    target = data_config.get("_target_") if isinstance(data_config, Mapping) else None
    rows = count_rows(loader)
    described: dict[str, Any] = {
        "name": (target or kind).rpartition(".")[2].removeprefix("load_"),
        "context": label,
        "source": {"class": kind, **({"data": str(target)} if target else {})},
        "profile": {} if rows is None else {"num_rows": rows},
    }
    try:
        content = held_tensors(loader)
        described["digest"] = digest(content)
    except (TypeError, RuntimeError):  # samples that are read as they are needed, or tensors without a flat memory
        settings = flatten(data_config) if target else {}
        known = json.dumps([described, settings], sort_keys=True)
        return {**described, "digest": hashlib.blake2b(known.encode(), digest_size=8).hexdigest()}
    specs = [json.dumps([{"type": "tensor", "tensor-spec": tensor_spec(tensor)}]) for tensor in content[:2]]
    described["schema"] = {"mlflow_tensorspec": dict(zip(("features", "targets"), specs, strict=False))}
    return described


def tensor_spec(tensor: Tensor) -> dict[str, Any]:
    """Return the type and shape of a batch in MLflow's form, the number of samples left open."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [-1, *tensor.shape[1:]]}


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
