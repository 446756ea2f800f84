"""Describes a run in words: its model, its data, and what runs at which event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from runner import Event, LoggerDestination
from runner.terminal import show_path

if TYPE_CHECKING:
    from runner import Logger, State

TRAIN_LOSS = "loss/train/total"  # the key under which each batch's loss is logged
MAX_EVENTS = 8
MAX_METRICS = 8  # in a line, for training and for each evaluator


def describe_run(state: State) -> Iterator[tuple[str, str]]:
    """Yield pairs of label and text that describe the model, the data and how it is trained."""
    from runner import get_world_size

    model = state.unwrapped_model
    parameters = list(model.parameters())
    total = sum(one.numel() for one in parameters)
    trainable = sum(one.numel() for one in parameters if one.requires_grad)
    inner = getattr(model, "module", None)
    name = type(model).__name__ + (f"({type(inner).__name__})" if inner is not None else "")
    of_these = "all trainable" if trainable == total else f"{_count(trainable)} trainable"
    yield "model", f"{name}, {_count(total)} parameters, {of_these}"
    loaders = [("train", state.train_dataloader), *((one.label, one.dataloader) for one in state.evaluators)]
    yield "data", "; ".join(f"{label} {_describe_loader(loader)}" for label, loader in loaders)
    optimizers = ", ".join(type(one).__name__ for one in state.optimizers)
    where = f"{state.precision} on {state.device}, {get_world_size()} process{'es' * (get_world_size() > 1)}"
    yield "training", f"{state.max_duration} with {optimizers}; {where}, seed {state.rank_zero_seed}"
    yield "run", show_path(state.run_dir)


def _describe_loader(loader: Any) -> str:
    order = getattr(loader, "order", None)
    samples = order.num_samples if order is not None else _length(getattr(loader, "dataset", None))
    batch_size = getattr(order or loader, "batch_size", None)
    batches = _length(loader)
    parts = [
        f"{samples:,} samples" if samples is not None else "",
        f"{batches:,} batch{'es' * (batches != 1)}" if batches is not None else "",
    ]
    shown = " in ".join(part for part in parts if part) or "of unknown length"
    return f"{shown} of {batch_size}" if batch_size is not None and batches is not None else shown


def describe_events(state: State, logger: Logger) -> Iterator[tuple[str, str]]:
    """Yield which algorithms and callbacks run at which events, in order; events with the same list share a line."""
    from runner import Engine
    from runner.metrics import TrainerLog, TrainMetrics

    engine = Engine(state, logger)
    groups: dict[tuple[str, ...], list[str]] = {}
    for event in Event:
        users = (one for one in engine.listeners(event) if not isinstance(one, LoggerDestination))
        names = tuple(one.config_key for one in users if not isinstance(one, TrainMetrics | TrainerLog))
        if names:
            groups.setdefault(names, []).append(event.value)
    lines = [f"{', '.join(events)}: {', '.join(names)}" for names, events in groups.items()]
    if len(lines) > MAX_EVENTS:
        hidden = len(lines) - MAX_EVENTS + 1
        lines[-hidden:] = [f"and {hidden} more lines: python -m runner mode=explain shows all"]
    yield from zip(["events", *[""] * len(lines)], lines, strict=False)


def _count(number: int) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except TypeError:
        return None


def describe_metrics(values: Mapping[str, float]) -> list[str]:
    """Return metrics as text, one part for training and one per evaluator, such as 'eval loss 0.12 Accuracy 0.98'."""
    parts: dict[str, list[str]] = {}
    for key in sorted(values, key=lambda key: key.count("/")):  # metrics before their parts, such as single classes
        kind, _, rest = key.partition("/")
        label, _, name = rest.partition("/")
        if kind == "loss" and name == "total":
            parts.setdefault(label, []).insert(0, f"loss {values[key]:.4g}")
        elif kind == "metrics":
            short = name.removeprefix("Multiclass").removeprefix("Binary")
            parts.setdefault(label, []).append(f"{short} {values[key]:.4g}")
    for shown in parts.values():
        if len(shown) > MAX_METRICS:
            shown[MAX_METRICS:] = [f"and {len(shown) - MAX_METRICS:,} more"]
    return [f"{label} {' '.join(parts[label])}" for label in sorted(parts, key=lambda one: one != "train")]
