"""The names of metrics: what is logged as 'loss/eval/total' is shown to users as 'eval/loss'.

Wherever users name a metric, both names work.
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
    """Return the label and name of a logged key: ('eval', 'loss') for 'loss/eval/total'.

    For a part of a loss it is ('train', 'loss/part'). The label is empty for a user's own key such as `loss/mine`.
    """
    kind, _, path = key.partition("/")
    label, _, name = path.rpartition("/") if path.count("/") < 2 else path.partition("/")
    if kind == "loss" and label:
        name = "loss" if name == "total" else f"loss/{name}"
    return label, name


def short_name(name: str) -> str:
    """Return 'eval/loss' for the logged 'loss/eval/total'; return any other name unchanged."""
    is_logged = name.startswith(("loss/", "metrics/")) and name.count("/") > 1
    return "/".join(name_metric(name)) if is_logged else name


def metrics_named(name: str, metrics: Iterable[str]) -> list[str]:
    """Return the metrics 'label/name' to which a name refers; without a label, those of all evaluators."""
    metrics = [*metrics]
    return [metric for metric in metrics if metric in (name, short_name(name))] or [
        metric for metric in metrics if metric.partition("/")[2] == name and not metric.startswith("train/")
    ]


class MetricChoice(NamedTuple):
    """A metric of this run: its label, which is 'train' or an evaluator's, and its name."""

    label: str
    name: str

    def read(self, state: State) -> float | None:
        """Return its last value, or None before the first. An intended sync: call it only after evaluations."""
        value = state.metric_values.get(self.label, {}).get(self.name)
        return None if value is None else float(value)

    def is_fresh(self, state: State) -> bool:
        """Return whether its last value was measured with the current weights."""
        if self.label == "train":
            return state.timestamp.batch > 0 and state.timestamp.batch_in_epoch == 0
        evaluated_at = {evaluator.label: evaluator.evaluated_at for evaluator in state.evaluators}
        return evaluated_at[self.label] == state.timestamp.batch

    def score(self, state: State, lower_is_better: bool) -> float | None:
        """Return the score of the current weights, lower is better; None if it is unknown or not finite."""
        value = self.read(state) if self.is_fresh(state) else None
        if value is None or not math.isfinite(value):
            return None
        return value if lower_is_better else -value

    def lower_is_better(self, state: State) -> bool:
        """Return whether lower values are better, judging by the metric's name or its `higher_is_better`."""
        from runner.training.metrics import lower_is_better  # imports torch, which a sweep's leader does without

        metrics = state.train_metrics if self.label == "train" else state.eval_metrics.get(self.label, {})
        return lower_is_better(self.name, metrics.get(self.name))


def choose_metric(state: State, monitor: str, argument: str = "monitor", label: str | None = None) -> MetricChoice:
    """Return the metric that a name refers to. Every evaluator has a 'loss'.

    Args:
        state: the state, with its metrics and evaluators.
        monitor: the name: 'eval/MulticlassAccuracy', the logged 'metrics/eval/MulticlassAccuracy', or without a label
            'MulticlassAccuracy'.
        argument: the argument that held `monitor`, for messages.
        label: where to look up a name without a label; None: in all evaluators but those of test data; only one of
            them may have such a metric.

    Raises:
        ValueError: no metric has this name, or several have it.
    """
    choices = [MetricChoice("train", name) for name in state.train_metrics]
    for evaluator in state.evaluators:
        names = dict.fromkeys(["loss", *state.eval_metrics.get(evaluator.label, {})])
        choices += [MetricChoice(evaluator.label, name) for name in names]
    left_out = {"train", *(evaluator.label for evaluator in state.evaluators if evaluator.is_test)}
    labels = {metric.label for metric in choices} - left_out if label is None else {label}
    named = [metric for metric in choices if f"{metric.label}/{metric.name}" in (monitor, short_name(monitor))]
    named = named or [metric for metric in choices if metric.name == monitor and metric.label in labels]
    if len(named) != 1:
        problem = "is the name of several metrics" if named else "is not a metric of this run"
        names = tuple(f"{metric.label}/{metric.name}" for metric in choices)
        listed = ", ".join(map(repr, names)) or "none: this run evaluates nothing"
        requested = f"{argument}={monitor!r}" + ("" if label is None else f" of {label!r}")
        error = ValueError(f"{requested} {problem}; there are {listed}")
        annotate(error, argument=argument, allowed=names)
        raise error
    _warn_if_never_measured(state, named[0], f"{argument}={monitor!r}")
    return named[0]


def _warn_if_never_measured(state: State, choice: MetricChoice, requested: str) -> None:
    from runner.distributed.ranks import get_global_rank  # imports torch, which a sweep's leader does without

    intervals = {evaluator.label: evaluator.eval_interval for evaluator in state.evaluators}
    interval = intervals.get(choice.label)
    if isinstance(interval, Interval) and not interval.time.value and get_global_rank() == 0:
        reason = f"{choice.label!r} is not evaluated there (eval_interval=0)"
        log.warning("%s never has a value in training: %s", requested, reason)
