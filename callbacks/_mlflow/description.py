"""Describes a run for MLflow: its parameters, command, data sets, origin, and a summary in words.

Importing this module imports only the standard library.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.callbacks._run_description import describe_run
from runner.files.git import git, root_of, submodules
from runner.terminal.commands import show_typed, typed_command

if TYPE_CHECKING:
    from torch import Tensor

    from runner import State

# Runs that differ only in these keys are the same experiment.
START_KEYS = ("run_name", "experiment_name")
PLUMBING = ("trainer", "launch", "callbacks")  # sections whose values become parameters only if they are not defaults
OWN_CLASSES = ("runner.", "torch.")  # packages whose classes the config's choice names already
NO_LIMIT = 10_000  # columns


def describe_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that define a run, so that a list of runs can be filtered by their differences.

    Arguments of the trainer, the launch and the callbacks are parameters if they differ from the defaults of their
    classes. So are all other values of the config, except for null, empty values, copies of the seed, the runner's own
    classes, and the usual positions of inputs and targets in a batch. Typed keys are added with the run's record.
    """
    shown = {key: value for key, value in config.items() if key not in START_KEYS}
    if algorithms := shown.get("algorithms"):
        shown["algorithms"] = {"": ", ".join(algorithms), **algorithms}
    for section in PLUMBING:
        if isinstance(shown.get(section), Mapping):
            shown[section] = _changed(shown[section])
    if isinstance(callbacks := shown.get("callbacks"), Mapping):
        shown["callbacks"] = {key: value for key, value in callbacks.items() if key != "mlflow_logger"}
    return {key: value for key, value in flatten(shown).items() if not _is_trivial(key, value, config.get("seed"))}


def _changed(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section that differ from the defaults of the classes that it names."""
    nested = {key: _changed(value) for key, value in section.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in section.items() if key not in nested}
    module, _, name = str(section.get("_target_", "")).rpartition(".")
    try:
        parameters = signature(getattr(sys.modules.get(module), name)).parameters
    except (AttributeError, TypeError, ValueError):
        parameters = {}
    values = (plain | nested).items()
    return {key: value for key, value in values if key not in parameters or parameters[key].default != value}


def _is_trivial(key: str, value: str, seed: Any) -> bool:
    """Return whether a value would say nothing in a list of runs."""
    name = key.rpartition(".")[2]
    is_copy = name == "seed" and key != "seed" and value == str(seed)
    is_own = name == "_target_" and value.startswith(OWN_CLASSES)
    is_usual = (name.endswith("_key") and value in ("0", "1")) or (key, value) == ("init_weights", "in_order")
    is_plumbing = name in ("_partial_", "_convert_", "_recursive_")
    return is_copy or is_own or is_usual or is_plumbing or value in ("null", "{}", "[]", "")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values as `{"optimizer.lr": "0.1"}`, written as on the command line: null, true, [1, 2].

    Lists that contain mappings are flattened by index. Any other list is one value.
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


def note_command() -> str:
    """Return the command as inline code in Markdown, because MLflow does not wrap code blocks."""
    return f"`` {show_typed(typed_command())} ``"


def typed_overrides() -> dict[str, str]:
    """Return the typed values by key, except those that only control how the command runs."""
    matches = (re.fullmatch(r"[+~]{0,2}([\w./]+)=(.*)", word, re.DOTALL) for word in typed_command())
    excluded = {"hydra", "callbacks", "launch", *START_KEYS}
    return {match[1]: match[2] for match in matches if match and re.split("[./]", match[1])[0] not in excluded}


def describe_beginning(state: State) -> list[dict[str, Any]]:
    """Return spool entries on a run's size, checkpoints, data sets, description, and columns of the list of runs."""
    sizes = [(weight.numel(), weight.requires_grad) for weight in state.unwrapped_model.parameters()]
    total = sum(size for size, _ in sizes)
    trainable = sum(size for size, is_trained in sizes if is_trained)
    params = {"model.num_parameters": str(total)}
    if trainable < total:
        params["model.num_trainable"] = str(trainable)
    savers: list[Any] = [callback for callback in state.callbacks if hasattr(callback, "best_checkpoint")]
    tags = {"runner.checkpoints": str(Path(state.run_dir).resolve() / savers[0].folder)} if savers else {}
    loaders = [
        ("train", state.train_dataloader),
        *((evaluator.label, evaluator.dataloader) for evaluator in state.evaluators),
    ]
    datasets = [describe_dataset(loader, label, state.config.get("data")) for label, loader in loaders]
    data = ", ".join(dict.fromkeys(dataset["name"] for dataset in datasets))
    note = [note_command(), *describe_run(state, width=NO_LIMIT), f"Data: {data}"]
    return [
        {"params": params},
        {"tags": tags},
        *({"input": dataset} for dataset in datasets),
        {"note": "\n\n".join(note)},
        {"view": _columns(state)},
    ]


def _columns(state: State) -> list[str]:
    """Return the columns of the list of runs: the results of evaluations, and the typed keys."""
    columns = []
    for evaluator in state.evaluators:
        label = evaluator.label
        names = state.eval_metrics.get(label, {})
        keys = [*(f"metrics/{label}/{name}" for name in names), f"loss/{label}/total"]
        columns += [f"metrics.`{key}`" for key in (*keys, *(f"best/{label}/{name}" for name in names))]
    return columns + [f"params.`{key}`" for key in dict.fromkeys(["model", *typed_overrides()])]


def describe_dataset(loader: Any, label: str, data_config: Any) -> dict[str, Any]:
    """Return the description of a data set as an MLflow input, with as much as its loader reveals.

    Runs whose data has the same content share a data set in MLflow, so the description leaves out the batch size.
    """
    from runner.data.content import count_rows, digest, held_tensors

    dataset = getattr(loader, "dataset", loader)
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    target = data_config.get("_target_") if isinstance(data_config, Mapping) else None
    rows = count_rows(loader)
    description: dict[str, Any] = {
        "name": (target or kind).rpartition(".")[2].removeprefix("load_"),
        "context": label,
        "source": {"class": kind, **({"data": str(target)} if target else {})},
        "profile": {} if rows is None else {"num_rows": rows},
    }
    try:
        content = held_tensors(loader)
        description["digest"] = digest(content)
    except (TypeError, RuntimeError):  # samples that are read on demand, or tensors without flat memory
        settings = flatten(data_config) if target else {}
        text = json.dumps([description, settings], sort_keys=True)
        return {**description, "digest": hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}
    specs = [json.dumps([{"type": "tensor", "tensor-spec": tensor_spec(tensor)}]) for tensor in content[:2]]
    description["schema"] = {"mlflow_tensorspec": dict(zip(("features", "targets"), specs, strict=False))}
    return description


def tensor_spec(tensor: Tensor) -> dict[str, Any]:
    """Return the type and shape of a batch in MLflow's format, with any number of samples."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [-1, *tensor.shape[1:]]}


def origin_tags(command: Sequence[str], cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags on the origin of a run, which `MlflowClient.create_run` does not set.

    The command begins with the interpreter; the commit is that of the repository that contains `cwd`.
    """
    tags = {
        "mlflow.source.name": show_typed(command),
        "mlflow.source.type": "JOB",  # for LOCAL, the UI would cut the command at its last slash
        "host": platform.node(),
        "python": platform.python_version(),
    }
    with contextlib.suppress(KeyError, OSError):  # a container's user id may have no name
        tags["mlflow.user"] = getpass.getuser()
    with contextlib.suppress(PackageNotFoundError):  # a build from source may have no metadata
        tags["torch"] = version("torch")
    return tags | git_tags(cwd, run_dir)


def git_tags(cwd: str, run_dir: Path) -> dict[str, str]:
    """Return tags with the commit and branch of the run's code, and whether it is dirty; empty outside a repository.

    The code is dirty if tracked files are modified, or if the run keeps uncommitted modules in `code/`.
    """
    options = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
    try:
        status = git(*options, folder=cwd).decode(errors="replace").splitlines()
        changes = [git("status", "--porcelain", *options[3:], folder=path) for path in submodules(root_of(cwd))]
    except (OSError, subprocess.SubprocessError):
        return {}
    is_dirty = (run_dir / "code").is_dir() or any(changes) or any(not line.startswith("#") for line in status)
    heads = dict(line[2:].split(" ", 1) for line in status if line.startswith("# branch."))
    return {
        "mlflow.source.git.commit": heads["branch.oid"],
        "mlflow.source.git.branch": heads["branch.head"],
        "mlflow.source.git.dirty": str(is_dirty).lower(),
    }
