"""How callbacks find the metric that they watch: by name, checked against those that exist."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from runner import State

LOWER_IS_BETTER = ("loss", "error", "perplexity")


class MetricChoice(NamedTuple):
    """A metric that exists in this run: of 'train' or of an evaluator, by label and name."""

    label: str
    name: str

    def read(self, state: State) -> float | None:
        """Return its last value, None before there is one. The intended host-device sync: after an evaluation only."""
        value = state.metric_values.get(self.label, {}).get(self.name)
        return None if value is None else float(value)

    def score(self, state: State, lower_is_better: bool) -> float | None:
        """Return its value for the weights as they are now, the less the better; None where there is none, or NaN."""
        if self.label == "train":
            is_fresh = state.timestamp.batch > 0 and state.timestamp.batch_in_epoch == 0
        else:
            evaluated_at = {one.label: one.evaluated_at for one in state.evaluators}
            is_fresh = evaluated_at[self.label] == state.timestamp.batch
        value = self.read(state) if is_fresh else None
        if value is None or math.isnan(value):
            return None
        return value if lower_is_better else -value

    def lower_is_better(self, state: State) -> bool:
        """Whether a smaller value is the better one: by its name, or else by what the metric says of itself."""
        metrics = state.train_metrics if self.label == "train" else state.eval_metrics.get(self.label, {})
        said = getattr(metrics.get(self.name), "higher_is_better", None)
        return any(word in self.name.lower() for word in LOWER_IS_BETTER) or said is False


def choose_metric(state: State, monitor: str) -> MetricChoice:
    """Return the metric that `monitor` names: 'MulticlassAccuracy', or 'eval/MulticlassAccuracy' with its label.

    Without a label it is an evaluator's. Every evaluator has a 'loss'.

    Raises:
        ValueError: there is no such metric, or several; those that there are get listed.
    """
    choices = [MetricChoice("train", name) for name in state.train_metrics]
    for evaluator in state.evaluators:
        names = dict.fromkeys(["loss", *state.eval_metrics.get(evaluator.label, {})])
        choices += [MetricChoice(evaluator.label, name) for name in names]
    named = [one for one in choices if monitor == f"{one.label}/{one.name}"]
    named = named or [one for one in choices if monitor == one.name and one.label != "train"]
    if len(named) != 1:
        trouble = "is the name of several metrics" if named else "is no metric of this run"
        listed = ", ".join(repr(f"{one.label}/{one.name}") for one in choices) or "none: this run evaluates nothing"
        raise ValueError(f"monitor={monitor!r} {trouble}; there are {listed}")
    return named[0]
