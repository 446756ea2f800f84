"""The learning rates of an optimizer under schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.optim.schedulers import Schedule, warn_of_lengths
from runner.timing.time import Progress, Time, Timestamp

if TYPE_CHECKING:
    from torch.optim import Optimizer


def _base_rate(group: dict[str, Any]) -> float:
    if "initial_lr" not in group:
        group["initial_lr"] = float(group["lr"])  # a host-device sync for a tensor, once and before training
    return group["initial_lr"]


class ScheduledRates:
    """Sets an optimizer's learning rates: each group's base rate times the product of the schedules' multipliers.

    Each batch's rate is computed from the base rate and the batch's timestamp, never from the previous rate. So
    rounding errors do not add up, and the base rates are all that a resumed run needs. The base rate is the group's
    `initial_lr`, which is set to its `lr` if it is missing, as in torch's schedulers. A rate that is a tensor is
    updated in place. Without schedules the rates do not change.
    """

    def __init__(self, optimizer: Optimizer, schedules: Sequence[Schedule]) -> None:
        self.optimizer = optimizer
        self.schedules = tuple(schedules)
        self._multipliers: list[Callable[[Timestamp], float]] = []
        self._bound_to: tuple[Time | None, int | None] = (None, None)
        self._warned = False
        for group in optimizer.param_groups:
            _base_rate(group)

    def step(self, progress: Progress) -> None:
        """Set the rates for the batch at `progress`; raises ValueError like `Schedule.bind`."""
        timestamp, max_duration, batches_per_epoch = progress
        if max_duration is not self._bound_to[0] or batches_per_epoch != self._bound_to[1]:
            self._multipliers = [schedule.bind(max_duration, batches_per_epoch) for schedule in self.schedules]
            if not self._warned:
                self._warned = warn_of_lengths(self.schedules, max_duration, self._bound_to, batches_per_epoch)
            self._bound_to = max_duration, batches_per_epoch
        multiplier = math.prod([multiplier_at(timestamp) for multiplier_at in self._multipliers])
        for group in self.optimizer.param_groups if self.schedules else ():
            rate = _base_rate(group) * multiplier
            if isinstance(group["lr"], float | int):
                group["lr"] = rate
            else:
                group["lr"].fill_(rate)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the base rate of each group."""
        return {"base_rates": [_base_rate(group) for group in self.optimizer.param_groups]}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the base rates; the next `step` sets the rates. ValueError: not one base rate per group."""
        groups = self.optimizer.param_groups
        base_rates = state["base_rates"]
        if len(groups) != len(base_rates):
            raise ValueError(f"base_rates={base_rates!r} must have one rate for each of the {len(groups)} groups")
        for group, base_rate in zip(groups, base_rates, strict=True):
            group["initial_lr"] = base_rate
