"""LAWA: evaluations and checkpoints see the mean of the latest weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner import Logger, State, Time
from runner.algorithms._averaging import TimedAverage, WeightAverage, wide_copy
from runner.failures.checks import check_whole, parse_interval


def mean_of(snapshots: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean, by name, of tensors with the same names and shapes."""
    return {name: torch.stack([snapshot[name] for snapshot in snapshots]).mean(dim=0) for name in snapshots[0]}


class LAWA(TimedAverage, WeightAverage):
    """Keeps the parameters of the latest updates, and their mean for evaluations.

    The mean (w_(n-k+1) + ... + w_n) / k of a window of k weights, unlike that of SWA, forgets the first ones, so it can
    be used from the start of training (Kaddour 2022). Each update computes it anew from the k copies, so that rounding
    errors do not add up.

    Training continues with its own weights. From the first update on, evaluations, exports and a checkpoint's
    `model.pt` see the mean, with batch norm statistics estimated for it, see `bn_batches`. Weights in 16 bits are
    averaged in 32. This takes `window + 1` times the memory of the weights, on their device and in each checkpoint. The
    mean is the same on all ranks. If there will be no update, a warning says so when training starts, or when it ends
    if that is not known earlier.

    Args:
        window: number of latest updates to average, at least 1.
        update_interval: time between two updates, a time string such as '100ba' or a number of epochs.
        start: when updates begin, a time string in any unit such as '0.5dur'.
        bn_batches: number of training batches to estimate batch norm statistics from, whenever a new mean is evaluated
            or saved; the first ones of this rank, before algorithms change them. 0 keeps the statistics of training.

    Raises:
        ValueError: an argument is out of range; or, when training starts, the train dataloader cannot be read for
            `bn_batches`.

    Evidence:
        Some: equal quality earlier in training, on ImageNet and for BERT (Kaddour 2022, "Stop Wasting My Time! Saving
        Days of ImageNet and BERT Training with Latest Weight Averaging", arXiv:2209.14981); small after a full decay.
    """

    conflicts_with = ("EMA", "SWA", "ScheduleFree")

    def __init__(
        self,
        window: int = 5,
        update_interval: str | int | Time = "1ep",
        start: str | Time = "0.0dur",
        bn_batches: int = 10,
    ) -> None:
        super().__init__(bn_batches)
        check_whole("window", window, 1)
        self.window = window
        self.update_interval = parse_interval("update_interval", update_interval, "1ep")
        self.start = Time.parse(start, "start")
        self._snapshots: deque[dict[str, Tensor]] = deque(maxlen=window)

    def after_load(self, state: State, logger: Logger) -> None:
        super().after_load(state, logger)
        self._snapshots = deque(map(self._placed, self._snapshots), maxlen=self.window)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._update(state)

    epoch_end = batch_end

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        super()._add(name, parameter)
        for snapshot in self._snapshots:
            snapshot[name] = wide_copy(parameter)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "snapshots": [*self._snapshots]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._snapshots = deque(state["snapshots"], maxlen=self.window)

    def _is_due(self, state: State) -> bool:
        has_started = state.progress.elapsed_in(self.start.unit) >= self.start.value
        return has_started and state.is_due(self.update_interval)

    def _update(self, state: State) -> None:
        if self._is_due(state):
            self._snapshots.append({name: wide_copy(weight) for name, weight in self._parameters.items()})
            self._average = mean_of(self._snapshots)
            self._changed()
