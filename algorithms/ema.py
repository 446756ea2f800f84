"""EMA: evaluations and checkpoints see an exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor

from runner import Interval, Logger, State, Time, TimeUnit, get_global_rank
from runner.algorithms._averaging import TimedAverage, copy_all, count_updates, log, move_towards, swapped_in, wide_copy
from runner.checkpoints.weights import names_of_observers
from runner.distributed.sharding import like
from runner.failures.checks import check_number
from runner.failures.errors import wrong_argument


def smoothing_of(half_life: float, interval: float = 1.0) -> float:
    """Return the factor that the old average keeps at an update, 2^(-interval / half_life), in [0, 1).

    A value that entered the average k updates ago has been multiplied by s^k since then. Half of its contribution is
    left after one half-life, which is half_life / interval updates: s^(half_life / interval) = 1/2.

    Args:
        half_life: time over which the contribution of past weights halves, above 0.
        interval: time between two updates, in the same unit.
    """
    return 2 ** -(interval / half_life)


def update_average(averages: Sequence[Tensor], values: Sequence[Tensor], smoothing: float) -> None:
    """Set each average a to smoothing * a + (1 - smoothing) * v, in place, in one fused operation.

    After n updates with the factor s, the average holds (1 - s) s^k times the value from k updates ago, and s^n times
    its initial value; these weights sum to 1.

    Args:
        averages: floating-point tensors, changed in place.
        values: tensors of the same shapes, in the averages' precision or a lower one.
        smoothing: factor that the old average keeps, in [0, 1).
    """
    move_towards(averages, values, 1 - smoothing)


class EMA(TimedAverage):
    """Keeps an exponential moving average of parameters and floating-point buffers; other buffers are copied.

    Training continues with its own weights. Evaluations, exports and a checkpoint's `model.pt` see the average, and the
    training weights are restored afterwards, even after an error. The average starts as a copy of the weights at
    `start`; until then evaluations see the training weights. Weights in 16 bits are averaged in 32, for precision.
    Observers of torch's quantization keep their ranges from training, because these are infinite or have no shape at
    first. Warns if the half-life is longer than the run, or if there will be no update.

    Args:
        half_life: time over which the contribution of past weights halves, in batches or epochs ('1000ba', '2ep'); None
            if `smoothing` is given.
        smoothing: factor that the old average keeps at an update, in [0, 1); replaces `half_life`.
        start: when averaging begins, a time string in any unit such as '0.7dur'.
        update_interval: time between two updates, in the unit of `half_life`; None for every batch, or for every epoch
            if the half-life is in epochs.

    Raises:
        ValueError: both or neither of `half_life` and `smoothing` are given, a value is out of range, or the units of
            `half_life` and `update_interval` differ.

    Evidence:
        Strong for evaluation before the learning rate has decayed (Polyak and Juditsky 1992; Izmailov et al. 2018,
        arXiv:1803.05407); small after a full decay.
    """

    conflicts_with = ("SWA", "LAWA", "ScheduleFree")

    def __init__(
        self,
        half_life: str | Time | None = "1000ba",
        smoothing: float | None = None,
        start: str | Time = "0.0dur",
        update_interval: str | Time | None = None,
    ) -> None:
        if (half_life is None) == (smoothing is None):
            raise ValueError(
                f"half_life={half_life!r} and smoothing={smoothing!r}: give exactly one, with the other set to None"
            )
        check_number("smoothing", smoothing, "[0, 1)", none="a half_life")
        life = None if half_life is None else _parse("half_life", half_life)
        if update_interval is None:
            update_interval = Time(1, TimeUnit.BATCH if life is None else life.unit)
        interval = _parse("update_interval", update_interval)
        if life is not None and life.unit is not interval.unit:
            raise wrong_argument("update_interval", str(interval), f"must be in the unit of half_life={str(life)!r}")
        self.half_life = half_life
        self._life = life
        self.start = Time.parse(start, "start")
        self.update_interval = Interval(interval, "update_interval")
        self.smoothing = smoothing_of(life.value, interval.value) if life is not None else smoothing or 0.0
        self._average: dict[str, Tensor] = {}
        self._updated = False
        self._live: dict[str, Tensor] = {}
        self._floating: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._swapped = False

    def after_load(self, state: State, logger: Logger) -> None:
        model = state.unwrapped_model
        observers = names_of_observers(model)
        buffers = (pair for pair in model.named_buffers() if pair[0].rpartition(".")[0] not in observers)
        self._live = dict(chain(model.named_parameters(), buffers))
        if self._average:
            differing = sorted(self._average.keys() ^ self._live.keys())
            if differing:
                raise ValueError(f"the saved average belongs to another model: only one of the two has {differing}")
            self._keep({name: like(self._average[name], live) for name, live in self._live.items()})

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        if self._warned or self._life is None or get_global_rank() != 0:
            return
        if not count_updates(state, self._life, Time(0.0, TimeUnit.DURATION), self.end):
            message = "%s.half_life=%r is longer than the run of %r: the average hardly moves away from its start"
            log.warning(message, self.config_key, str(self._life), str(state.max_duration))

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self._average and state.progress.elapsed_in(self.start.unit) >= self.start.value:
            self._keep({name: wide_copy(live) for name, live in self._live.items()})

    def batch_end(self, state: State, logger: Logger) -> None:
        self._update(state)

    epoch_end = batch_end

    @contextmanager
    def evaluation_weights(self, state: State) -> Iterator[None]:
        if not self._average or self._swapped:
            yield
            return
        self._swapped = True
        try:
            with swapped_in([*self._live.values()], [*self._average.values()]):
                yield
        finally:
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average, "updated": self._updated} if self._average else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average = dict(state.get("average", {}))
        self._updated = state.get("updated", True)

    def _is_updated(self) -> bool:
        return self._updated

    def _update(self, state: State) -> None:
        if self._average and state.is_due(self.update_interval):
            update_average(*self._floating, self.smoothing)
            copy_all(*self._copied)
            self._updated = True

    def _keep(self, average: dict[str, Tensor]) -> None:
        self._average = average
        self._floating = ([], [])
        self._copied = ([], [])
        for name, live in self._live.items():
            averages, values = self._floating if live.is_floating_point() or live.is_complex() else self._copied
            averages.append(average[name])
            values.append(live)


def _parse(name: str, value: str | Time) -> Time:
    time = Time.parse(value, name)
    if time.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or not time.value:
        raise wrong_argument(
            name, str(time), "must be a number of batches or epochs above 0, such as '1000ba' or '2ep'"
        )
    return time
