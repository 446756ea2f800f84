"""The facts known about a run when training starts, as entries of its spool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.callbacks._mlflow.data_sets import describe_inputs
from runner.callbacks._mlflow.description import show_command
from runner.callbacks._mlflow.target import typed_command, typed_overrides
from runner.callbacks._run_description import describe_run

if TYPE_CHECKING:
    from runner import State

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
    return "\n\n".join([f"```\n{show_command(typed_command())}\n```", *described, *([f"Data: {data}"] if data else [])])


def _columns(state: State) -> list[str]:
    """Return the columns of the list of runs: the values of evaluations, and the keys that were typed."""
    columns = []
    for one in state.evaluators:
        names = [f"metrics/{one.label}/{name}" for name in state.eval_metrics.get(one.label, {})]
        columns += [f"metrics.`{key}`" for key in (*names, f"loss/{one.label}/total")]
        columns += [f"metrics.`best/{one.label}/{name}`" for name in state.eval_metrics.get(one.label, {})]
    return columns + [f"params.`{key}`" for key in dict.fromkeys(["model", *typed_overrides()])]
