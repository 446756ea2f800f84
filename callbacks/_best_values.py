"""Tracks the best value of each loss and metric of the evaluators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner.training.metric_choice import MetricChoice, name_metric

if TYPE_CHECKING:
    from runner import State


class BestValues:
    """The best value so far of each loss and metric of the evaluators, by logging key."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.other_keys: set[str] = set()
        """Keys seen so far that do not come from an evaluation, and so have no best value."""
        self._lower_is_better: dict[str, bool] = {}  # by key

    def add(self, key: str, value: float, state: State) -> bool:
        """Record a logged value, and return whether it is the best of its key so far. NaN never is."""
        if key in self.other_keys:
            return False
        lower_is_better = self._lower_is_better.get(key)
        if lower_is_better is None:
            lower_is_better = _lower_is_better(key, state)
            if lower_is_better is None:
                self.other_keys.add(key)
                return False
            self._lower_is_better[key] = lower_is_better
        best = self.values.get(key)
        if math.isnan(value) or (best is not None and (value >= best if lower_is_better else value <= best)):
            return False
        self.values[key] = value
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the best values, for a checkpoint."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the best values from a checkpoint."""
        self.values = dict(state)


def _lower_is_better(key: str, state: State) -> bool | None:
    """Return whether lower values of a key are better; None if the key does not come from an evaluation."""
    label, name = name_metric(key)
    if not key.startswith(("loss/", "metrics/")) or label in ("", "train"):
        return None
    return key.startswith("loss/") or MetricChoice(label, name).lower_is_better(state)
