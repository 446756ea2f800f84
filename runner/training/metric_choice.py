"""The names of metrics: as they are logged, 'loss/eval/total', and as they are shown and typed, 'eval/loss'.

Every place that takes the name of a metric takes both.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from runner.failures.facts import annotate
from runner.timing.time import Interval

if TYPE_CHECKING:
    from runner.core.state import State


log = logging.getLogger("runner")


def name_metric(key: str) -> tuple[str, str]:
    """Return the label and name of a logged key: ('eval', 'loss') of 'loss/eval/total'.

    Parts of a loss are ('train', 'loss/part'). The label is empty if a user has logged something like `loss/mine`.
    """
    kind, _, rest = key.partition("/")
    label, _, name = rest.rpartition("/") if rest.count("/") < 2 else rest.partition("/")
    if kind == "loss" and label:
        name = "loss" if name == "total" else f"loss/{name}"
    return label, name


def short_name(name: str) -> str:
    """Return 'eval/loss' of the logged 'loss/eval/total', and any name that is not a logged one as it is."""
    is_logged = name.startswith(("loss/", "metrics/")) and name.count("/") > 1
    return "/".join(name_metric(name)) if is_logged else name


def metrics_named(name: str, metrics: Iterable[str]) -> list[str]:
    """Return those of the metrics 'label/name' that a name means; without a label, it means those of all evaluators."""
    metrics = [*metrics]
    return [one for one in metrics if one in (name, short_name(name))] or [
        one for one in metrics if one.partition("/")[2] == name and not one.startswith("train/")
    ]


class MetricChoice(NamedTuple):
    """A metric of this run, identified by its name and its label, which is 'train' or that of an evaluator."""

    label: str
    name: str

    def read(self, state: State) -> float | None:
        """Return its last value, or None before the first. An intended host-device sync, after an evaluation only."""
        value = state.metric_values.get(self.label, {}).get(self.name)
        return None if value is None else float(value)

    def is_fresh(self, state: State) -> bool:
        """Return whether its last value was measured with the current weights."""
        if self.label == "train":
            return state.timestamp.batch > 0 and state.timestamp.batch_in_epoch == 0
        evaluated_at = {one.label: one.evaluated_at for one in state.evaluators}
        return evaluated_at[self.label] == state.timestamp.batch

    def score(self, state: State, lower_is_better: bool) -> float | None:
        """Return a score of the current weights, lower is better; None if there is none or it is not finite."""
        value = self.read(state) if self.is_fresh(state) else None
        if value is None or not math.isfinite(value):
            return None
        return value if lower_is_better else -value

    def lower_is_better(self, state: State) -> bool:
        """Return whether lower values are better, judged by the metric's name or by what the metric declares."""
        from runner.training.metrics import lower_is_better  # imports torch, which a sweep's leader does without

        metrics = state.train_metrics if self.label == "train" else state.eval_metrics.get(self.label, {})
        return lower_is_better(self.name, metrics.get(self.name))


def choose_metric(state: State, monitor: str, argument: str = "monitor", label: str | None = None) -> MetricChoice:
    """Return the metric with a given name, such as 'MulticlassAccuracy' or, with its label, 'eval/MulticlassAccuracy'.

    The name under which it is logged, 'metrics/eval/MulticlassAccuracy', has a label too. Every evaluator has a 'loss'.
    `argument` is what `monitor` was given as. A name without a label is looked up under `label`, or without one in the
    only evaluator that has a metric of that name, test data aside.
    """
    choices = [MetricChoice("train", name) for name in state.train_metrics]
    for evaluator in state.evaluators:
        names = dict.fromkeys(["loss", *state.eval_metrics.get(evaluator.label, {})])
        choices += [MetricChoice(evaluator.label, name) for name in names]
    left_out = {"train", *(one.label for one in state.evaluators if one.is_test)}
    asked = [one for one in choices if one.label == label or (label is None and one.label not in left_out)]
    named = [one for one in choices if f"{one.label}/{one.name}" in (monitor, short_name(monitor))]
    named = named or [one for one in asked if monitor == one.name]
    if len(named) != 1:
        problem = "is the name of several metrics" if named else "is not a metric of this run"
        names = tuple(f"{one.label}/{one.name}" for one in choices)
        listed = ", ".join(map(repr, names)) or "none: this run evaluates nothing"
        asked_for = f"{argument}={monitor!r}" + ("" if label is None else f" of {label!r}")
        error = ValueError(f"{asked_for} {problem}; there are {listed}")
        annotate(error, argument=argument, allowed=names)
        raise error
    _warn_if_never_measured(state, named[0], f"{argument}={monitor!r}")
    return named[0]


def _warn_if_never_measured(state: State, choice: MetricChoice, asked_for: str) -> None:
    from runner.distributed.ranks import get_global_rank  # imports torch, which a sweep's leader does without

    intervals = {one.label: one.eval_interval for one in state.evaluators}
    interval = intervals.get(choice.label)
    if isinstance(interval, Interval) and not interval.time.value and get_global_rank() == 0:
        log.warning(
            "%s never has a value in training: %r is not evaluated there (eval_interval=0)", asked_for, choice.label
        )
