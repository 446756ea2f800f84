"""The best values of evaluations so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.training.metric_choice import MetricChoice, name_metric

if TYPE_CHECKING:
    from runner import State


class BestValues:
    """The best value so far of each loss and metric of the evaluators, by the key under which it is logged."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.others: set[str] = set()
        """Keys that were seen and have no best value, as they are not of an evaluation."""
        self._lower: dict[str, bool] = {}  # by key, whether lower is better

    def add(self, key: str, value: float, state: State) -> bool:
        """Note a value that was logged, and return whether it is the best of its key so far; NaN never is."""
        if key in self.others:
            return False
        lower = self._lower.get(key)
        if lower is None:
            lower = _lower_is_better(key, state)
            if lower is None:
                self.others.add(key)
                return False
            self._lower[key] = lower
        best = self.values.get(key)
        if math.isnan(value) or (best is not None and (value >= best if lower else value <= best)):
            return False
        self.values[key] = value
        return True

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.values = dict(state)


def _lower_is_better(key: str, state: State) -> bool | None:
    label, name = name_metric(key)
    if not key.startswith(("loss/", "metrics/")) or label in ("", "train"):
        return None
    return key.startswith("loss/") or MetricChoice(label, name).lower_is_better(state)
