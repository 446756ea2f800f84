"""The order in which algorithms run, which their classes declare, and the names of hooks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from runner.core.hooks import Algorithm, Hooks
from runner.failures.errors import wrong_argument

H = TypeVar("H", bound=Hooks)


def order_algorithms(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    """Return algorithms in the order in which they run: as given, unless they declare another order.

    Raises:
        ValueError: two algorithms conflict, or the declared orders form a cycle.
    """
    for first, second in conflicts_among(algorithms):
        raise ValueError(f"algorithms {first!r} and {second!r} cannot be combined: remove one of them")
    return sort_algorithms(algorithms)


def conflicts_among(algorithms: Sequence[Algorithm]) -> list[tuple[str, str]]:
    """Return the pairs of classes that cannot be combined: the class that declares the conflict, and the other one."""
    names = [type(algorithm).__name__ for algorithm in algorithms]
    return [
        (name, other)
        for name, algorithm in zip(names, algorithms, strict=True)
        for other in algorithm.conflicts_with
        if other in names and (other != name or names.count(other) > 1)
    ]


def sort_algorithms(algorithms: Sequence[Algorithm]) -> list[Algorithm]:
    """Return algorithms in the order in which they run, without checking for conflicts."""
    names = [type(algorithm).__name__ for algorithm in algorithms]
    before: dict[int, set[int]] = {index: set() for index in range(len(algorithms))}
    for index, algorithm in enumerate(algorithms):
        for other, name in enumerate(names):
            if name in algorithm.runs_before and other != index:
                before[other].add(index)
            if name in algorithm.runs_after and other != index:
                before[index].add(other)
    try:
        sorter = TopologicalSorter(before)
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(names[index] for index in list[int](error.args[1]))
        raise ValueError(f"algorithms form a cycle in runs_before/runs_after: {cycle}") from None
    ordered: list[int] = []
    ready = list(sorter.get_ready())
    while ready:
        ready.sort()
        ordered.append(ready.pop(0))
        sorter.done(ordered[-1])
        ready += sorter.get_ready()
    return [algorithms[index] for index in ordered]


def name_hooks(hooks: Sequence[H]) -> tuple[H, ...]:
    """Give each hook without a `config_key` its class name in snake case, with a number if that name is taken."""
    taken = {hook.config_key: 1 for hook in hooks if hook.config_key}  # values: the last number tried with the key
    if len({id(hook) for hook in hooks}) < len(hooks) or len(taken) < sum(bool(hook.config_key) for hook in hooks):
        argument = "algorithms" if isinstance(hooks[0], Algorithm) else "callbacks"
        raise wrong_argument(argument, hooks, "has the same object or config_key twice; each needs its own")
    for hook in hooks:
        if not hook.config_key:
            hook.config_key = stem = snake_case(type(hook).__name__)
            while hook.config_key in taken:
                taken[stem] += 1
                hook.config_key = f"{stem}_{taken[stem]}"
            taken[hook.config_key] = 1
    return tuple(hooks)


# Names with capital letters that do not start a word.
_WHOLE = re.compile("MLflow|MLPerf|NaN|NGram|WandB|TensorBoard|MixUp|CutMix|CutOut|ColOut|AugMix|BlurPool|ALiBi")


def snake_case(name: str) -> str:
    """Return the config name of a class: `SpeedMonitor` -> `speed_monitor`, `MLflowLogger` -> `mlflow_logger`."""
    name = _WHOLE.sub(lambda match: match[0].capitalize(), name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
