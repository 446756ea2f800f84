"""Learning-rate schedules: pure functions from time to a multiplier of the base rate.

Every schedule takes `t_warmup`: while t < t_warmup, the multiplier is t / t_warmup times the schedule's value at t = 0
(`alpha` for `constant`, `alpha_i` for `linear`, 1 for all others). In the formulas t is the time since the start of
training and x = (t - t_warmup) / (t_max - t_warmup), held at 1 from t_max on. A time in epochs includes the fraction of
the current epoch if the number of its batches is known.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, ClassVar

from runner.timing.time import Progress, Time, Timestamp, TimeUnit, convert, exact_ratio

log = logging.getLogger("runner")

Length = Callable[[Any], Fraction]
Shape = Callable[[float], float]


def time_axis(unit: TimeUnit, max_duration: Time, batches: int | None) -> tuple[Length, Callable[[Timestamp], float]]:
    """Return two functions: the exact length of a time on the axis of a unit, and a timestamp's position on it.

    Epochs are measured in batches if the number of batches in an epoch is known.
    """
    per_epoch = batches if unit is TimeUnit.EPOCH else None

    def length(time: Time) -> Fraction:
        return convert(time, unit, max_duration, batches) * (per_epoch or 1) if time.value else Fraction(0)

    def position(timestamp: Timestamp) -> float:
        return timestamp.epoch * per_epoch + timestamp.batch_in_epoch if per_epoch else timestamp.count(unit)

    return length, position


class Schedule(ABC):
    """A multiplier of the learning rate, 0 or more, as a function of time: `schedule(progress)`."""

    def __call__(self, progress: Progress) -> float:
        """Return the multiplier at this point of training; raises ValueError like `bind`."""
        return self.bind(progress.max_duration, progress.batches_per_epoch)(progress.timestamp)

    @abstractmethod
    def bind(self, max_duration: Time, batches_per_epoch: int | None) -> Callable[[Timestamp], float]:
        """Return the multiplier as a function of the timestamp alone, with all times checked and converted.

        Raises:
            ValueError: the schedule does not fit the length of the run.
        """


def warn_of_lengths(
    schedules: Iterable[Schedule],
    max_duration: Time,
    before: tuple[Time | None, int | None],
    batches_per_epoch: int | None,
) -> bool:
    """Warn of a schedule that is inexact, because the number of batches per epoch is unknown or has changed.

    `before` has the run's duration and the number of batches per epoch until now, with None for what was unknown.

    Returns:
        Whether it warned of a changed number.

    Raises:
        ValueError: the rate would be 0 for a whole epoch.
    """
    if batches_per_epoch is None and before[0] is None:
        _warn_of_whole_epochs(schedules, max_duration)
    return batches_per_epoch != (before[1] or batches_per_epoch) and _warn_of_mixed_units(schedules, max_duration)


def _warn_of_mixed_units(schedules: Iterable[Schedule], max_duration: Time) -> bool:
    """Warn of the first schedule that converts between epochs and batches; return whether one does.

    Call it when the number of batches in an epoch has changed. Times in epochs stay exact, as do fractions of a
    max_duration in epochs, because a position in an epoch is a fraction of that epoch.
    """
    for schedule in schedules:
        try:
            schedule.bind(max_duration, None)
        except ValueError:
            log.warning(
                "%s: the number of batches varies between epochs, and its times are converted with that of the current "
                "epoch; give them and max_duration in one unit",
                schedule,
            )
            return True
    return False


def _warn_of_whole_epochs(schedules: Iterable[Schedule], max_duration: Time) -> None:
    """Warn of the first smooth schedule that changes only between epochs, for lack of the number of batches per epoch.

    Raises:
        ValueError: with its warm-up, the rate would be 0 for a whole epoch.
    """
    for schedule in schedules:
        if not isinstance(schedule, Curve) or not schedule._lengths or isinstance(schedule, step | multi_step):
            continue
        unit = getattr(schedule, schedule._lengths[0]).unit
        if (max_duration.unit if unit is TimeUnit.DURATION else unit) is TimeUnit.EPOCH:
            reason = "the data has no length, so the rate only changes between epochs"
            remedy = "give trainer.max_duration, and times of the schedule, in batches or samples (500ba, 64000sp)"
            if schedule.bind(max_duration, None)(Timestamp()) == 0:
                raise ValueError(f"{schedule}: {reason}, and is 0 in the first; {remedy}")
            log.warning("%s: %s; %s", schedule, reason, remedy)
            return


@dataclass(frozen=True)
class Curve(Schedule):
    """A schedule with a linear warm-up before its curve.

    Curves with equal arguments are equal, and curves can be pickled.

    Raises:
        ValueError: a time other than `t_warmup` is not above 0, or a number is infinite or below 0 (`t_mult`: below 1).
        TypeError: an argument is neither a time string nor a number.
    """

    t_warmup: str | Time = field(default="0ba", kw_only=True)

    _ratio: Fraction = field(default=Fraction(1), init=False, repr=False)  # factor for lengths, except those in dur
    _warmup_ratio: Fraction = field(default=Fraction(1), init=False, repr=False)

    # The fields that are lengths of time above 0; the first one sets the unit of the time axis.
    _lengths: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "t_warmup", Time.parse(self.t_warmup, "t_warmup"))
        for name in (entry.name for entry in fields(self) if entry.init and entry.name != "t_warmup"):
            value = getattr(self, name)
            minimum = 1 if name == "t_mult" else 0
            if name in self._lengths:
                is_single = name != "milestones" or type(value) in (str, Time)
                times = tuple(Time.parse(time, name) for time in ([value] if is_single else value))
                if not times or not all(time.value for time in times):
                    raise ValueError(f"{name}={value!r} must be a time above 0")
                object.__setattr__(self, name, times if name == "milestones" else times[0])
            elif not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} must be a number of at least {minimum}")
            elif not minimum <= value < math.inf:
                raise ValueError(f"{name}={value!r} must be a finite number of at least {minimum}")

    def bind(self, max_duration: Time, batches_per_epoch: int | None) -> Callable[[Timestamp], float]:
        """Return the multiplier as a function of the timestamp alone, with all times checked and converted.

        Raises:
            ValueError: the warm-up is longer than the schedule, or its times cannot be converted to one unit.
        """
        leading: Any = getattr(self, self._lengths[0]) if self._lengths else self.t_warmup
        warmup: Any = self.t_warmup
        unit, unit_of_warmup = (
            max_duration.unit if time.unit is TimeUnit.DURATION else time.unit
            for time in (leading[0] if isinstance(leading, tuple) else leading, warmup)
        )
        length, position = time_axis(unit, max_duration, batches_per_epoch)

        def scaled(time: Time, ratio: Fraction = self._ratio, length: Length = length) -> Fraction:
            return length(time) * (1 if time.unit is TimeUnit.DURATION else ratio)

        exact_warmup = scaled(warmup, self._warmup_ratio)
        curve = self._curve(scaled, exact_warmup)
        initial = curve(0)
        warmup_position = position
        if warmup.value and unit_of_warmup is not unit:  # so that the warm-up keeps its length if epochs vary
            own_length, warmup_position = time_axis(unit_of_warmup, max_duration, batches_per_epoch)
            exact_warmup = scaled(warmup, self._warmup_ratio, own_length)
        end = float(exact_warmup)

        def multiplier(timestamp: Timestamp) -> float:
            t = position(timestamp)
            warmup_t = t if warmup_position is position else warmup_position(timestamp)
            return curve(t) if warmup_t >= end else initial * warmup_t / end

        return multiplier

    def scaled(self, ratio: float, scale_warmup: bool = False) -> Curve:
        """Return the schedule with its lengths multiplied by `ratio`, exactly; the warm-up only with `scale_warmup`.

        Lengths in `dur` are not multiplied, because they follow max_duration.

        Raises:
            ValueError: `ratio` is not a finite number above 0.
        """
        scaled = replace(self)
        object.__setattr__(scaled, "_ratio", self._ratio * exact_ratio(ratio))
        if scale_warmup:
            object.__setattr__(scaled, "_warmup_ratio", self._warmup_ratio * exact_ratio(ratio))
        return scaled

    @abstractmethod
    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        """Return the multiplier as a function of t; the warm-up rises to its value at t = 0."""


@dataclass(frozen=True)
class FunctionSchedule(Schedule):
    """A user's function from a `Timestamp` to a multiplier, called before each batch."""

    function: Callable[[Timestamp], float]

    def bind(self, max_duration: Time, batches_per_epoch: int | None) -> Callable[[Timestamp], float]:
        """Return the function, wrapped to check its values."""

        def multiplier(timestamp: Timestamp) -> float:
            value = self.function(timestamp)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                function: Any = getattr(self.function, "func", self.function)  # the function inside a partial
                problem = f"returned {value!r} at batch {timestamp.batch}"
                name = getattr(function, "__qualname__", function)
                raise ValueError(f"schedulers={name}: {problem}; must be a finite number of at least 0")
            return value

        return multiplier


@dataclass(frozen=True)
class constant(Curve):
    """`alpha` throughout."""

    alpha: float = 1.0

    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        return lambda t: self.alpha


@dataclass(frozen=True)
class step(Curve):
    """gamma ^ floor(t / step_size), where t includes the warm-up."""

    step_size: str | Time
    gamma: float = 0.1
    _lengths: ClassVar = ("step_size",)

    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        # In integers, because rounding could move a step to the next batch.
        numerator, denominator = length(self.step_size).as_integer_ratio()
        return lambda t: self.gamma ** (t * denominator // numerator)


@dataclass(frozen=True)
class multi_step(Curve):
    """gamma ^ (number of milestones at or before t), where t includes the warm-up."""

    milestones: Sequence[str | Time]
    gamma: float = 0.1
    _lengths: ClassVar = ("milestones",)

    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        passed = sorted(float(length(milestone)) for milestone in self.milestones)
        return lambda t: self.gamma ** bisect_right(passed, t)


@dataclass(frozen=True)
class exponential(Curve):
    """gamma ^ ((t - t_warmup) / decay_period): falls by a factor of gamma per period, a little in every batch."""

    gamma: float
    decay_period: str | Time = "1ep"
    _lengths: ClassVar = ("decay_period",)

    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        start = float(warmup)
        period = float(length(self.decay_period))
        return lambda t: self.gamma ** (max(0.0, t - start) / period)


@dataclass(frozen=True)
class cosine_annealing_warm_restarts(Curve):
    """alpha_f + (1 - alpha_f) * (1 + cos(pi * y)) / 2, where y rises from 0 to 1 in each cycle.

    The first cycle starts at t_warmup and lasts `t_0`; each later cycle is `t_mult` times as long as the previous one.
    Source: Loshchilov and Hutter 2017, SGDR, https://arxiv.org/abs/1608.03983.
    """

    t_0: str | Time
    t_mult: float = 1.0
    alpha_f: float = 0.0
    _lengths: ClassVar = ("t_0",)

    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        start = float(warmup)
        first_cycle = float(length(self.t_0))

        def curve(t: float) -> float:
            elapsed = max(0.0, t - start)  # time since the warm-up, and below, since the start of the current cycle
            cycle = first_cycle
            if self.t_mult == 1:
                elapsed %= cycle
            while elapsed >= cycle:
                elapsed -= cycle
                cycle *= self.t_mult
            return self.alpha_f + (1 - self.alpha_f) * (1 + math.cos(math.pi * elapsed / cycle)) / 2

        return curve


@dataclass(frozen=True)
class _Ending(Curve):
    """A schedule that reaches its final value at `t_max`."""

    t_max: str | Time = field(default="1dur", kw_only=True)
    _lengths: ClassVar = ("t_max",)

    @abstractmethod
    def _value(self, x: float) -> float:
        """Return the multiplier after a fraction x of the time from `_start` to `t_max`."""

    def _start(self, length: Length, warmup: Fraction) -> Fraction:
        """Return the time at which the curve starts to change."""
        return warmup

    def _curve(self, length: Length, warmup: Fraction) -> Shape:
        start = self._start(length, warmup)
        end = length(self.t_max)
        if not warmup <= start <= end:
            times = " + ".join(f"{name}={str(getattr(self, name))!r}" for name in ("t_warmup", *self._lengths[1:]))
            raise ValueError(f"{times} is longer than t_max={str(self.t_max)!r}: shorten it, or train longer")
        first = float(start)
        last = float(end)
        duration = float(end - start) or 1.0
        return lambda t: self._value(1.0 if t >= last else max(0.0, t - first) / duration)


@dataclass(frozen=True)
class linear(_Ending):
    """alpha_i + (alpha_f - alpha_i) * x, a straight line from `alpha_i` to `alpha_f`."""

    alpha_i: float = 1.0
    alpha_f: float = 0.0

    def _value(self, x: float) -> float:
        return self.alpha_i + (self.alpha_f - self.alpha_i) * x


@dataclass(frozen=True)
class cosine_annealing(_Ending):
    """alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2.

    The cosine falls from 1 to `alpha_f`, flat at both ends. Source: Loshchilov and Hutter 2017, SGDR,
    https://arxiv.org/abs/1608.03983, without restarts.
    """

    alpha_f: float = 0.0

    def _value(self, x: float) -> float:
        return self.alpha_f + (1 - self.alpha_f) * (1 + math.cos(math.pi * x)) / 2


@dataclass(frozen=True)
class polynomial(_Ending):
    """alpha_f + (1 - alpha_f) * (1 - x) ^ power, from 1 to `alpha_f`; a power of 1 is `linear`."""

    power: float
    alpha_f: float = 0.0

    def _value(self, x: float) -> float:
        return self.alpha_f + (1 - self.alpha_f) * (1 - x) ** self.power


@dataclass(frozen=True)
class warmup_stable_decay(_Ending):
    """1 until t_max - t_decay, then linear to `alpha_f` at t_max.

    Here x = (t - (t_max - t_decay)) / t_decay, and the decay is 1 + (alpha_f - 1) * x. Source: Hu et al. 2024, MiniCPM,
    https://arxiv.org/abs/2404.06395.
    """

    t_decay: str | Time = "0.4dur"
    alpha_f: float = 0.0
    _lengths: ClassVar = ("t_max", "t_decay")

    def _start(self, length: Length, warmup: Fraction) -> Fraction:
        return length(self.t_max) - length(self.t_decay)

    def _value(self, x: float) -> float:
        return 1 + (self.alpha_f - 1) * x
