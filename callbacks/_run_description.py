"""Describes a run in words: its model, its data, and which callbacks run at which event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner import Logger, State


def describe_run(state: State, width: int) -> list[str]:
    """Return a line on the model and its training, and a line on the data. Parts that do not fit are left out."""
    from torch import get_num_threads

    from runner import get_world_size
    from runner.data.content import describe_samples

    model = state.unwrapped_model
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    devices = f"{get_world_size()} x {state.device}" if get_world_size() > 1 else f"{state.device}"
    if state.device.type == "cpu":
        threads = get_num_threads()
        devices += f" ({threads} thread{'s' * (threads != 1)})"
    training = [
        type(getattr(model, "module", model)).__name__,
        f"{_count(total)} parameters" + ("" if trainable == total else f" ({_count(trainable)} trainable)"),
        f"{state.precision} on {devices}",
        ", ".join(type(optimizer).__name__ for optimizer in state.optimizers),
        f"seed {state.rank_zero_seed}",
    ]
    evaluated = []
    for evaluator in state.evaluators:
        loader = evaluator.dataloader
        samples = describe_samples(loader, evaluator.subset_num_batches) or _describe_loader(loader)
        evaluated.append(f"{evaluator.label} {samples}")
    data = [
        f"{state.max_duration}",
        f"train {_describe_loader(state.train_dataloader, state.train_dataloader_len)}",
        *evaluated,
    ]
    return [_fit(training, ", ", width), _fit(data, "; ", width)]


def describe_events(state: State, logger: Logger) -> Iterator[tuple[str, str]]:
    """Yield a line for each group of events at which the same algorithms and callbacks run: its label and its text."""
    from runner import Engine, Event, LoggerDestination
    from runner.training.metrics import TrainerLog, TrainMetrics

    engine = Engine(state, logger)
    hidden = LoggerDestination | TrainMetrics | TrainerLog
    groups: dict[tuple[str, ...], list[str]] = {}
    for event in Event:
        listeners = [listener for listener in engine.listeners(event) if not isinstance(listener, hidden)]
        names = tuple(listener.config_key for listener in listeners)
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
    text = " in ".join(part for part in parts if part) or "of unknown length"
    return f"{text} of {batch_size}" if batch_size is not None and batches is not None else text


def _fit(parts: Sequence[str], separator: str, width: int) -> str:
    """Join as many of the parts as fit in a line, and at least the first."""
    line = parts[0]
    for part in parts[1:]:
        if part and len(line) + len(separator) + len(part) <= width:
            line += separator + part
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
