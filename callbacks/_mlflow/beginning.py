"""The facts known about a run when training starts, as entries of its spool, its data sets among them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from runner import State
from runner.callbacks._mlflow.description import flatten
from runner.callbacks._mlflow.target import note_command, typed_overrides
from runner.callbacks._run_description import describe_run
from runner.data.content import count_rows, digest, held_tensors

NO_LIMIT = 10_000  # columns


def describe_beginning(state: State) -> list[dict[str, Any]]:
    """Return a run's data sets, its size, the place of its checkpoints, its description and the columns to list."""
    inputs = describe_inputs(state)
    sizes = [(one.numel(), one.requires_grad) for one in state.unwrapped_model.parameters()]
    total = sum(size for size, _ in sizes)
    trainable = sum(size for size, is_trained in sizes if is_trained)
    params = {"model.num_parameters": str(total)}
    if trainable < total:
        params["model.num_trainable"] = str(trainable)
    savers: list[Any] = [one for one in state.callbacks if hasattr(one, "best_checkpoint")]
    folders = [str(Path(state.run_dir).resolve() / one.folder) for one in savers]
    return [
        {"params": params},
        *({"tags": {"runner.checkpoints": folder}} for folder in folders[:1]),
        *({"input": one} for one in inputs),
        {"note": _note(state, inputs)},
        {"view": _columns(state)},
    ]


def _note(state: State, inputs: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of the run in Markdown: the command, the model and how it is trained, and the data."""
    data = ", ".join(dict.fromkeys(one["name"] for one in inputs))
    described = describe_run(state, width=NO_LIMIT)
    return "\n\n".join([note_command(), *described, *([f"Data: {data}"] if data else [])])


def _columns(state: State) -> list[str]:
    """Return the columns of the list of runs: the values of evaluations, and the keys that were typed."""
    columns = []
    for one in state.evaluators:
        names = [f"metrics/{one.label}/{name}" for name in state.eval_metrics.get(one.label, {})]
        columns += [f"metrics.`{key}`" for key in (*names, f"loss/{one.label}/total")]
        columns += [f"metrics.`best/{one.label}/{name}`" for name in state.eval_metrics.get(one.label, {})]
    return columns + [f"params.`{key}`" for key in dict.fromkeys(["model", *typed_overrides()])]


def describe_inputs(state: State) -> list[dict[str, Any]]:
    """Return descriptions of the run's data sets, as MLflow inputs."""
    loaders = [("train", state.train_dataloader), *((one.label, one.dataloader) for one in state.evaluators)]
    return [describe_dataset(loader, label, state.config.get("data")) for label, loader in loaders]


def describe_dataset(loader: Any, label: str, data_config: Any) -> dict[str, Any]:
    """Return a description of a data set as an MLflow input, as far as its loader provides one.

    Runs whose data has the same content share a data set in MLflow, so it says nothing of batches.
    """
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
    specs = [json.dumps([_spec(one)]) for one in content[:2]]
    described["schema"] = {"mlflow_tensorspec": dict(zip(("features", "targets"), specs, strict=False))}
    return described


def _spec(one: Tensor) -> dict[str, Any]:
    shape = [-1, *one.shape[1:]]
    return {"type": "tensor", "tensor-spec": {"dtype": str(one.dtype).removeprefix("torch."), "shape": shape}}
