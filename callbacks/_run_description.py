"""Describes a run in words: its model, its data, and what runs at which event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner import Logger, State


def describe_run(state: State, width: int) -> list[str]:
    """Return a line on the model and how it is trained, and a line on the data; parts that do not fit are left out."""
    from torch import get_num_threads

    from runner import get_world_size
    from runner.data.content import describe_samples

    model = state.unwrapped_model
    parameters = list(model.parameters())
    total = sum(one.numel() for one in parameters)
    trainable = sum(one.numel() for one in parameters if one.requires_grad)
    where = f"{get_world_size()} x {state.device}" if get_world_size() > 1 else f"{state.device}"
    if state.device.type == "cpu":
        threads = get_num_threads()
        where += f" ({threads} thread{'s' * (threads != 1)})"
    training = [
        type(getattr(model, "module", model)).__name__,
        f"{_count(total)} parameters" + ("" if trainable == total else f" ({_count(trainable)} trainable)"),
        f"{state.precision} on {where}",
        ", ".join(type(one).__name__ for one in state.optimizers),
        f"seed {state.rank_zero_seed}",
    ]
    evaluated = [
        f"{one.label} {describe_samples(one.dataloader, one.subset_num_batches) or _describe_loader(one.dataloader)}"
        for one in state.evaluators
    ]
    data = [
        f"{state.max_duration}",
        f"train {_describe_loader(state.train_dataloader, state.train_dataloader_len)}",
        *evaluated,
    ]
    return [_fit(training, ", ", width), _fit(data, "; ", width)]


def describe_events(state: State, logger: Logger) -> Iterator[tuple[str, str]]:
    """Yield which algorithms and callbacks run at which events, in order; events with the same list share a line."""
    from runner import Engine, Event, LoggerDestination
    from runner.training.metrics import TrainerLog, TrainMetrics

    engine = Engine(state, logger)
    groups: dict[tuple[str, ...], list[str]] = {}
    for event in Event:
        users = (one for one in engine.listeners(event) if not isinstance(one, LoggerDestination))
        names = tuple(one.config_key for one in users if not isinstance(one, TrainMetrics | TrainerLog))
        if names:
            groups.setdefault(names, []).append(event.value)
    for number, (names, events) in enumerate(groups.items()):
        yield "" if number else "events", f"{', '.join(events)}: {', '.join(names)}"


def _describe_loader(loader: Any, limit: int | None = None) -> str:
    from runner.data.content import describe_samples

    batch_size = getattr(getattr(loader, "order", None) or loader, "batch_size", None)
    batches = _length(loader) if limit is None else limit
    parts = [
        describe_samples(loader, limit),
        f"{batches:,} batch{'es' * (batches != 1)}" if batches is not None else "",
    ]
    shown = " in ".join(part for part in parts if part) or "of unknown length"
    return f"{shown} of {batch_size}" if batch_size is not None and batches is not None else shown


def _fit(parts: Sequence[str], between: str, width: int) -> str:
    """Return as many of the parts in one line as fit; the first is always there."""
    line = parts[0]
    for part in parts[1:]:
        if part and len(line) + len(between) + len(part) <= width:
            line += between + part
    return line


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
