"""SWA: evaluations and checkpoints see the mean of the weights over the last part of training."""

from __future__ import annotations

from typing import Any

from runner import Logger, State, Time
from runner.algorithms._averaging import (
    TimedAverage,
    WeightAverage,
    keep_base_rates,
    move_towards,
    set_rates,
    wide_copy,
)
from runner.failures.checks import check_number, check_whole, parse_interval
from runner.failures.errors import wrong_argument


def annealed(rate: float, swa_lr: float, progress: float) -> float:
    """Return a learning rate on the straight line from `rate` to `swa_lr`.

    Args:
        rate: learning rate at the start of the line.
        swa_lr: learning rate at its end, and after it.
        progress: position on the line, at least 0; 1 and above mean the end.
    """
    progress = min(1.0, progress)
    return rate * (1 - progress) + swa_lr * progress


class SWA(TimedAverage, WeightAverage):
    """Keeps the mean of the parameters at each update from `start` to `end`, all with equal weight.

    Update n moves the mean m by (w - m) / n towards the weights w, which gives the mean of all n weights, because
    n m_n = (n - 1) m_(n-1) + w_n. With a constant or cyclic rate, the weights move around a flat region of low loss,
    and their mean is closer to its center (Izmailov et al. 2018).

    Training continues with its own weights. From the first update on, evaluations, exports and a checkpoint's
    `model.pt` see the mean, with batch norm statistics estimated for it, see `bn_batches`. Weights in 16 bits are
    averaged in 32. The mean is the same on all ranks. If training ends before the first update, a warning says so
    when training starts, or when it ends if that is not known earlier.

    Args:
        start: when averaging begins, a time string in any unit such as '0.7dur'.
        end: when averaging ends, a time string in any unit; an update at that moment still counts.
        update_interval: time between two updates, a time string such as '100ba' or a number of epochs.
        swa_lr: learning rate of all parameter groups while averaging; None keeps the scheduled rates.
        anneal_steps: number of updates over which the scheduled rate moves linearly to `swa_lr`; 0 for an immediate
            change.
        bn_batches: number of training batches to estimate batch norm statistics from, whenever a new mean is evaluated
            or saved; the first ones of this rank, before algorithms change them. 0 keeps the statistics of training.

    Raises:
        ValueError: an argument is out of range; or, when training starts, no update falls between `start` and `end`,
            `swa_lr` is combined with torch's own schedulers, or the train dataloader cannot be read for `bn_batches`.

    Evidence:
        Strong with a constant or cyclic learning rate (Izmailov et al. 2018, arXiv:1803.05407); small after a full
        decay.
    """

    conflicts_with = ("EMA", "LAWA", "ScheduleFree")

    def __init__(
        self,
        start: str | Time = "0.7dur",
        end: str | Time = "0.97dur",
        update_interval: str | int | Time = "1ep",
        swa_lr: float | None = None,
        anneal_steps: int = 10,
        bn_batches: int = 10,
    ) -> None:
        super().__init__(bn_batches)
        self.start = Time.parse(start, "start")
        self.end = Time.parse(end, "end")
        if self.start.unit is self.end.unit and self.end.value < self.start.value:
            raise wrong_argument("end", str(self.end), f"must not be before start={str(self.start)!r}")
        self.update_interval = parse_interval("update_interval", update_interval, "1ep")
        check_number("swa_lr", swa_lr, "[0, inf]", none="the scheduled rates")
        check_whole("anneal_steps", anneal_steps, 0)
        self.swa_lr = swa_lr
        self.anneal_steps = anneal_steps
        self._count = 0

    def before_load(self, state: State, logger: Logger) -> None:
        self._planned = state.max_duration
        if self.swa_lr is not None:
            keep_base_rates(state, f"swa_lr={self.swa_lr!r}")

    def fit_start(self, state: State, logger: Logger) -> None:
        # `fit(duration=...)` may train only a part of the whole; then a later call may reach `start`.
        if state.max_duration is self._planned and not self._count_until(self.end, state):
            raise ValueError(self._without_update(state))
        super().fit_start(state, logger)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        if self.swa_lr is not None and self._count:
            swa_lr = self.swa_lr
            progress = self._count / max(1, self.anneal_steps)
            set_rates(state, lambda rate: annealed(rate, swa_lr, progress))

    def batch_end(self, state: State, logger: Logger) -> None:
        self._update(state)

    epoch_end = batch_end

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._count = state["count"]

    def _is_due(self, state: State) -> bool:
        elapsed = state.progress.elapsed_in
        has_started = elapsed(self.start.unit) >= self.start.value
        return state.is_due(self.update_interval) and has_started and elapsed(self.end.unit) <= self.end.value

    def _update(self, state: State) -> None:
        if not self._is_due(state):
            return
        if not self._average:
            self._average = {name: wide_copy(weight) for name, weight in self._parameters.items()}
        self._count += 1
        move_towards([*self._average.values()], [*self._parameters.values()], 1 / self._count)
        self._changed()
