"""Describes a run's data sets as inputs of MLflow, each with a digest of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from runner import State
from runner.callbacks._mlflow.description import flatten
from runner.data.content import count_rows, digest, held_tensors


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
