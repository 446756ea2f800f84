"""Composer's lengths and positions in training: counts are `Time` objects, wall-clock times are `timedelta`."""

# Composer's counts have the same names as ours, but other types.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from datetime import timedelta
from types import GenericAlias
from typing import Any

from runner.compat.composer import absent
from runner.failures.errors import wrong_argument
from runner.timing import time as ours
from runner.timing.time import TimeUnit

_NUMBER = re.compile(f"(-?(?:[0-9]+[.]?[0-9]*|[.][0-9]+)(?:e[+-]?[0-9]+)?)({'|'.join(TimeUnit)})")
_REAL = (TimeUnit.DURATION, TimeUnit.SECOND)


def _constructor(unit: TimeUnit) -> Callable[[Any, float], Time]:
    return lambda cls, value: cls(value, unit)


def _arithmetic(operate: Callable[[Any, Any], Any], swapped: bool = False) -> Callable[[Any, Any], Any]:
    """Return an operator of `Time` for operands of the same unit, whose result is a `Time` in that unit."""

    def method(self: Time, other: Any) -> Any:
        time = self._operand(other)
        if time is None:
            return NotImplemented
        value, other_value = self._numbers(time)
        return _from_result(operate(other_value, value) if swapped else operate(value, other_value), self.unit)

    return method


def _comparison(operate: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    def method(self: Time, other: Any) -> Any:
        time = self._operand(other)
        return NotImplemented if time is None else operate(*self._numbers(time))

    return method


class Time(ours.Time):
    """Composer's length of training, which also combines with plain numbers in its own unit.

    Multiplied or divided by a number, a length keeps its unit, and counts lose their fraction; the quotient of two
    lengths is in 'dur'.

    Args:
        value: an integer; in 'dur' and 'sec' any number.
        unit: the unit of the value.

    Raises:
        ValueError: the value is not an integer, or not a number.
    """

    __slots__ = ()
    __class_getitem__ = classmethod(GenericAlias)  # Time[int], in annotations

    def __init__(self, value: float, unit: TimeUnit | str) -> None:
        unit = TimeUnit(unit)
        number = float(value)
        if unit not in _REAL and not number.is_integer():
            raise ValueError(f"time='{value}{unit}': must be a whole number of {unit}; '0.5dur' is half of training")
        super().__init__(number if unit in _REAL else int(value), unit)

    from_iteration = classmethod(_constructor(TimeUnit.ITERATION))
    from_epoch = classmethod(_constructor(TimeUnit.EPOCH))
    from_batch = classmethod(_constructor(TimeUnit.BATCH))
    from_sample = classmethod(_constructor(TimeUnit.SAMPLE))
    from_token = classmethod(_constructor(TimeUnit.TOKEN))
    from_duration = classmethod(_constructor(TimeUnit.DURATION))
    from_second = classmethod(_constructor(TimeUnit.SECOND))

    @classmethod
    def from_timedelta(cls, value: timedelta | str) -> Time:
        """Return a wall-clock length from a `timedelta`, or from text such as '1h30m'."""
        return cls(value.total_seconds(), TimeUnit.SECOND) if isinstance(value, timedelta) else _from_ours(value)

    @classmethod
    def from_timestring(cls, timestring: str) -> Time:
        """Return the length of a time string. Besides the usual forms, '3e4tok' and '-1ba' are allowed."""
        match = _NUMBER.fullmatch(timestring)
        return _from_ours(timestring) if match is None else cls(float(match[1]), match[2])

    @classmethod
    def from_input(cls, i: Any, default_int_unit: TimeUnit | str | None = None) -> Time:
        """Return a length from a time string, a `Time`, or a number, which needs `default_int_unit`."""
        if isinstance(i, ours.Time):
            return _from_ours(i)
        if isinstance(i, str):
            return cls.from_timestring(i)
        if default_int_unit is None:
            raise wrong_argument(
                "time", i, f"a number needs a unit; give default_int_unit, or write '{i}ba' or '{i}ep'"
            )
        return cls(i, default_int_unit)

    def to_timestring(self) -> str:
        """Return the time string, such as '10ba'."""
        return str(self)

    def _operand(self, other: Any) -> ours.Time | None:
        if isinstance(other, ours.Time):
            return other
        if isinstance(other, str):
            return Time.from_timestring(other)
        return Time(other, self.unit) if isinstance(other, int | float) else None

    __add__ = __radd__ = _arithmetic(operator.add)
    __sub__ = _arithmetic(operator.sub)
    __rsub__ = _arithmetic(operator.sub, swapped=True)
    __mod__ = _arithmetic(operator.mod)
    __rmod__ = _arithmetic(operator.mod, swapped=True)
    __floordiv__ = _arithmetic(operator.floordiv)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    def __eq__(self, other: object) -> bool:
        return self.value == other if isinstance(other, int | float) else ours.Time.__eq__(self, other)

    __hash__ = ours.Time.__hash__

    def __mul__(self, other: Any) -> Time:
        if isinstance(other, int | float):
            return _from_result(self.value * other, self.unit)
        time = Time.from_input(other)
        if TimeUnit.DURATION not in (self.unit, time.unit):
            raise ValueError(f"{str(self)!r} * {str(time)!r}: one of them must be a number, or in 'dur'")
        return _from_result(self.value * time.value, time.unit if self.unit is TimeUnit.DURATION else self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Time:
        if isinstance(other, int | float):
            return _from_result(self.value / other, self.unit)
        value, other_value = self._numbers(Time.from_input(other))
        return Time(value / other_value, TimeUnit.DURATION)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __pos__(self) -> Time:
        return self

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)


def _from_result(value: float, unit: TimeUnit) -> Time:
    """Return the result of arithmetic as a `Time`; counts lose their fraction."""
    return Time(value if unit in _REAL else int(value), unit)


def _from_ours(time: str | ours.Time) -> Time:
    parsed = ours.Time.parse(time) if isinstance(time, str) else time
    return Time(parsed.value, parsed.unit)


def ensure_time(maybe_time: Any, int_unit: TimeUnit | str) -> Time:
    """Return a length from a time string, a `Time`, or a number of `int_unit`."""
    return Time.from_input(maybe_time, int_unit)


def _count(index: int, unit: TimeUnit) -> Any:
    return property(lambda self: Time(self[index], unit))


def _seconds(index: int) -> Any:
    return property(lambda self: timedelta(seconds=self[index]))


class Timestamp(ours.Timestamp):
    """Composer's position in training: `timestamp.batch` is a `Time`, `timestamp.batch.value` its count."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise absent.missing("timestamp", name, absent.TIMESTAMP)

    iteration: Time = _count(0, TimeUnit.ITERATION)
    epoch: Time = _count(1, TimeUnit.EPOCH)
    batch: Time = _count(2, TimeUnit.BATCH)
    sample: Time = _count(3, TimeUnit.SAMPLE)
    token: Time = _count(4, TimeUnit.TOKEN)
    epoch_in_iteration: Time = _count(5, TimeUnit.EPOCH)
    batch_in_epoch: Time = _count(6, TimeUnit.BATCH)
    sample_in_epoch: Time = _count(7, TimeUnit.SAMPLE)
    token_in_epoch: Time = _count(8, TimeUnit.TOKEN)
    total_wct: timedelta = _seconds(9)
    epoch_wct: timedelta = _seconds(10)
    batch_wct: timedelta = _seconds(11)

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the count of a unit since the start of training."""
        return Time(self.count(unit), unit)

    def to_next_batch(self, samples: Any = 0, tokens: Any = 0, duration: Any = 0.0) -> Timestamp:
        """Return the position after one more batch; the run's own time does not change."""
        return Timestamp(*ours.Timestamp(*self).to_next_batch(int(samples), int(tokens), _in_seconds(duration)))

    def to_next_epoch(self, duration: Any = 0.0) -> Timestamp:
        """Return the position at the start of the next epoch."""
        return Timestamp(*ours.Timestamp(*self).to_next_epoch(_in_seconds(duration)))

    def to_next_iteration(self) -> Timestamp:
        """Return the position at the start of the next iteration."""
        return Timestamp(*ours.Timestamp(*self).to_next_iteration())


def _in_seconds(duration: Any) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration or 0.0)
