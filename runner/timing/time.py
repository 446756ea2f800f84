"""Training time: lengths (`Time`), positions (`Timestamp`), intervals (`Interval`) and progress (`Progress`)."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from runner.timing.nearest_times import nearest_times


class TimeUnit(StrEnum):
    """The unit of a `Time`; the value is the suffix in a time string."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


_NUMBER = "[0-9]+(?:[.][0-9]+)?"
_COUNT = re.compile(f"([0-9]+)(iter|ep|ba|sp|tok)|({_NUMBER})(dur|sec)")
_CLOCK = re.compile(f"(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?")
_ALLOWED = (
    "a whole number with a unit ('10ep', '100ba'; also iter, sp, tok), a fraction of max_duration from 0 to 1 "
    "('0.5dur'), or wall-clock time ('90s', '1h30m')"
)
_UNIT_OF_WORD = {word: unit.value for unit in TimeUnit for word in (unit.value, unit.name.lower())}
_UNIT_OF_WORD |= {"%": "dur", "step": "ba", "h": "h", "hour": "h", "m": "m", "minute": "m", "s": "s"}


def _operator(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a binary method of `Time` or `Timestamp` that applies `operate` to the operands' numbers."""

    def method(self: Any, other: object) -> Any:
        if not isinstance(other, Time | str):
            return NotImplemented
        result = operate(*self._numbers(Time.parse(other) if isinstance(other, str) else other))
        return Time(result, self.unit) if operate in (operator.add, operator.sub) else result

    return method


_lt, _le, _gt, _ge = map(_operator, (operator.lt, operator.le, operator.gt, operator.ge))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Time:
    """A length of training in one unit: an int, but a float for `dur` (a fraction of max_duration) and `sec`.

    Lengths in the same unit can be added, subtracted, divided (giving a float) and compared. One of the two may be a
    time string. Differences may be negative.

    Raises:
        TypeError: `value` is not a finite number, or not an int although the unit is counted in whole numbers.
        ValueError: `unit` does not exist.
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: int | float, unit: TimeUnit | str) -> None:
        unit = TimeUnit(unit)
        kinds, kind = ((int, float), "a finite number") if unit in ("dur", "sec") else (int, "an int")
        if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value):
            raise TypeError(f"value={value!r} in unit {unit.value!r} must be {kind}")
        object.__setattr__(self, "value", value if kinds is int else float(value))
        object.__setattr__(self, "unit", unit)

    @classmethod
    def parse(cls, value: str | Time, name: str = "time") -> Time:
        """Return the length given by a time string such as `'10ba'`, `'0.5dur'` or `'1h30m'`.

        Args:
            value: a time string; a `Time` is only checked and returned.
            name: the user's name for the value, for messages.

        Raises:
            TypeError: `value` is neither a string nor a `Time`.
            ValueError: the string is not a time, or the time is negative or above `'1dur'`.
        """
        time = _read(value) if isinstance(value, str) else value
        if isinstance(time, Time) and 0 <= time.value <= (1 if time.unit is TimeUnit.DURATION else math.inf):
            return time
        error, shown = (ValueError, str(value)) if isinstance(value, str | Time) else (TypeError, value)
        near = nearest_times(str(value), _UNIT_OF_WORD)
        question = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        problem = error(f"{name}={shown!r} is not a time: give {_ALLOWED}.{question}")
        vars(problem)["meant"] = "".join(near[:1])  # a correction that programs can use
        raise problem

    @classmethod
    def parse_or_epochs(cls, value: int | str | Time, name: str = "time") -> Time:
        """Return the length given by a time string, a `Time` or a number of epochs; errors are those of `parse`."""
        return cls.parse(cls(value, TimeUnit.EPOCH) if type(value) is int else value, name)  # type: ignore[arg-type]

    @property
    def exact(self) -> Fraction:
        """The exact decimal value: `'0.1dur'` is 1/10, not the nearest float."""
        return Fraction(repr(self.value))

    def scaled(self, ratio: float, batches_per_epoch: int | None) -> Time:
        """Return this length multiplied by `ratio`, converted to batches if the result is not a whole number of epochs.

        Fractions of a batch, sample or token are dropped.

        Raises:
            ValueError: the result is zero, or includes part of an epoch whose length is unknown; or `ratio` is not a
                finite number above 0.
        """
        unit = self.unit
        exact = self.exact * exact_ratio(ratio)
        if unit is TimeUnit.EPOCH and exact.denominator > 1:
            if batches_per_epoch is None:
                epochs = f"{str(self)!r} would be {float(exact):g} epochs of unknown length"
                raise ValueError(f"scale_schedule_ratio={ratio!r}: {epochs}; give max_duration in batches")
            exact *= batches_per_epoch
            unit = TimeUnit.BATCH
        value = math.floor(exact) if isinstance(self.value, int) else float(exact)
        if not value:
            raise ValueError(f"scale_schedule_ratio={ratio!r} leaves nothing of {str(self)!r}: give a larger one")
        return Time(value, unit)

    def _numbers(self, other: Time) -> tuple[int | float, int | float]:
        if other.unit is not self.unit:
            raise ValueError(f"{str(self)!r} and {str(other)!r} are in different units: give both in one unit")
        return self.value, other.value

    __add__, __sub__, __truediv__ = map(_operator, (operator.add, operator.sub, operator.truediv))
    __lt__, __le__, __gt__, __ge__ = _lt, _le, _gt, _ge

    def __eq__(self, other: object) -> bool:
        time = _read(other) if isinstance(other, str) else other
        if isinstance(time, Timestamp):
            return NotImplemented  # a Timestamp compares its own count
        return isinstance(time, Time) and (self.value, self.unit) == (time.value, time.unit)

    def __str__(self) -> str:
        return f"{Decimal(repr(self.value)):f}".removesuffix(".0") + self.unit

    def __repr__(self) -> str:
        return f"Time({self.value!r}, {str(self.unit)!r})"


@lru_cache(maxsize=1024)
def _read(text: str) -> Time | None:
    """Return the time given by a string, or None. Cached, because each batch compares strings with timestamps."""
    if match := _COUNT.fullmatch(text):
        count, unit, real, real_unit = match.groups()
        return Time(int(count), unit) if count else Time(float(real), real_unit)
    if text and (match := _CLOCK.fullmatch(text)):
        hours, minutes, seconds = (Fraction(part or 0) for part in match.groups())
        return Time(float(3600 * hours + 60 * minutes + seconds), TimeUnit.SECOND)
    return None


_FIELD_OF_UNIT = {"iter": 0, "ep": 1, "ba": 2, "sp": 3, "tok": 4, "sec": 9}


class Timestamp(NamedTuple):
    """A position in training: counts over all ranks, and this rank's wall-clock seconds excluding evaluation.

    Timestamps are immutable; the `to_next_*` methods return the next one. A comparison with a `Time` or a time string
    uses the count in its unit (`timestamp >= "10ba"`, `timestamp == "10ba"`). Two timestamps are equal if all their
    fields are. The class is a tuple because tuples are the fastest to create.
    """

    iteration: int = 0
    epoch: int = 0
    batch: int = 0
    sample: int = 0
    token: int = 0
    epoch_in_iteration: int = 0
    batch_in_epoch: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    total_wct: float = 0.0
    epoch_wct: float = 0.0
    batch_wct: float = 0.0

    def to_next_batch(self, samples: int = 0, tokens: int = 0, duration: float = 0.0) -> Timestamp:
        """Return the position after one more batch.

        Args:
            samples: the batch's samples over all ranks.
            tokens: the batch's tokens over all ranks.
            duration: the seconds that the batch took.
        """
        iteration, epoch, batch, sample, token, epochs, batches, sample_in, token_in, total, in_epoch, _ = self
        return tuple.__new__(Timestamp, (
            iteration, epoch, batch + 1, sample + samples, token + tokens, epochs, batches + 1,
            sample_in + samples, token_in + tokens, total + duration, in_epoch + duration, duration,
        ))  # fmt: skip

    def to_next_epoch(self, duration: float = 0.0) -> Timestamp:
        """Return the position at the start of the next epoch, `duration` seconds later."""
        return Timestamp(
            self.iteration, self.epoch + 1, self.batch, self.sample, self.token, self.epoch_in_iteration + 1,
            total_wct=self.total_wct + duration, batch_wct=self.batch_wct,
        )  # fmt: skip

    def to_next_iteration(self) -> Timestamp:
        """Return the position at the start of the next iteration."""
        return self._replace(iteration=self.iteration + 1, epoch_in_iteration=0)

    # Hides tuple.count, which is useless for a position.
    def count(self, unit: TimeUnit | str) -> int | float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the count of a unit since the start of training, as a plain number.

        Raises:
            ValueError: `unit` is `dur`, which only `Progress` can count.
        """
        if unit not in _FIELD_OF_UNIT:
            raise ValueError(f"{str(TimeUnit(unit))!r} is a fraction of max_duration, unknown here: give another unit")
        return self[_FIELD_OF_UNIT[unit]]

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the count of a unit since the start of training, as a `Time`."""
        return Time(self.count(unit), unit)

    def _numbers(self, other: Time) -> tuple[int | float, int | float]:
        return self.count(other.unit), other.value

    def __eq__(self, other: object) -> bool:
        time = _read(other) if isinstance(other, str) else other
        return self.count(time.unit) == time.value if isinstance(time, Time) else tuple.__eq__(self, other)  # type: ignore[arg-type]

    __ne__ = object.__ne__  # the opposite of `__eq__`, not tuple's own
    __hash__ = tuple.__hash__

    def __lt__(self, other: object) -> bool:
        return _lt(self, other)

    def __le__(self, other: object) -> bool:
        return _le(self, other)

    def __gt__(self, other: object) -> bool:
        return _gt(self, other)

    def __ge__(self, other: object) -> bool:
        return _ge(self, other)

    def state_dict(self) -> dict[str, int | float]:
        """Return the fields by name, as plain numbers."""
        return self._asdict()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, int | float]) -> Timestamp:
        """Return the timestamp with the given `state_dict()`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        if state.keys() != set(cls._fields):
            raise ValueError(f"state={dict(state)!r} must have exactly the keys {', '.join(cls._fields)}")
        return cls(**state)  # type: ignore[arg-type]


def exact_ratio(ratio: float) -> Fraction:
    """Return the exact decimal value of `scale_schedule_ratio`: 0.1 is 1/10.

    Raises:
        ValueError: the ratio is not a finite number above 0.
    """
    if not 0 < ratio < math.inf:
        raise ValueError(f"scale_schedule_ratio={ratio!r} must be a finite number above 0")
    return Fraction(repr(float(ratio)))


def convert(time: Time, unit: TimeUnit | str, max_duration: Time | None, batches_per_epoch: int | None) -> Fraction:
    """Return the exact length of `time` in another unit.

    Fractions (`dur`) are converted through `max_duration`, epochs and batches through the batches per epoch.

    Raises:
        ValueError: there is no conversion between the two units, or the number of batches per epoch is unknown.
    """
    if time.unit == unit:
        return time.exact
    if max_duration is not None and max_duration.unit is not TimeUnit.DURATION:
        if time.unit is TimeUnit.DURATION:
            return time.exact * convert(max_duration, unit, max_duration, batches_per_epoch)
        if unit == TimeUnit.DURATION:
            return convert(time, max_duration.unit, max_duration, batches_per_epoch) / max_duration.exact
    if batches_per_epoch and {time.unit, unit} == {"ep", "ba"}:
        return time.exact * batches_per_epoch if unit == TimeUnit.BATCH else time.exact / batches_per_epoch
    context = f"max_duration={str(max_duration)!r}, batches_per_epoch={batches_per_epoch!r}"
    raise ValueError(f"{str(time)!r} cannot be expressed in {str(unit)!r} ({context}): give all times in one unit")


@dataclass(frozen=True, init=False)
class Interval:
    """An interval such as `'2ep'` or `'0.25dur'`, due each time training reaches a multiple of it.

    An int is a number of epochs; 0 means never. In a run measured in epochs, a fraction may be due inside an epoch if
    the number of batches per epoch is known; otherwise it is due at the end of the epoch. A multiple at the end of an
    epoch is due when the epoch has ended, not at its last batch: `'0.5dur'` of `'2ep'` acts like `'1ep'`.
    """

    time: Time
    is_at_epoch_ends: bool = field(compare=False, repr=False)
    """Whether it is never due inside an epoch, because it counts epochs or iterations, or is never due at all."""
    _bound: tuple[Time | None, int | None, Callable[[Timestamp], int | float]] | None = field(compare=False, repr=False)

    def __init__(self, value: int | str | Time, name: str = "interval") -> None:
        object.__setattr__(self, "time", Time.parse_or_epochs(value, name))
        object.__setattr__(self, "is_at_epoch_ends", self.time.unit in ("ep", "iter") or not self.time.value)
        object.__setattr__(self, "_bound", None)

    def is_due(
        self,
        previous: Timestamp,
        now: Timestamp,
        max_duration: Time | None = None,
        batches_per_epoch: int | None = None,
    ) -> bool:
        """Return whether a multiple of the interval is in (previous, now], counted in the interval's unit.

        Args:
            previous: the position before a call of `to_next_*`.
            now: the position after the call.
            max_duration: the length of the run, which a `dur` interval needs.
            batches_per_epoch: the number of batches per epoch; None if the loader has no length.

        Raises:
            ValueError: the interval is in `dur`, and `max_duration` is None.
        """
        if not self.time.value:
            return False
        bound = self._bound
        if bound is None or bound[0] is not max_duration or bound[1] != batches_per_epoch:  # only after a change
            bound = max_duration, batches_per_epoch, self._counter(max_duration, batches_per_epoch)
            object.__setattr__(self, "_bound", bound)
        multiples = bound[2]
        return multiples(now) > multiples(previous)

    def _counter(self, max_duration: Time | None, batches: int | None) -> Callable[[Timestamp], int | float]:
        """Return a function from a position to the number of multiples reached by then."""
        is_fraction = self.time.unit is TimeUnit.DURATION
        run_unit = max_duration.unit if max_duration else TimeUnit.BATCH  # without a max_duration, convert() raises
        unit = run_unit if is_fraction else self.time.unit
        if batches and is_fraction and unit is TimeUnit.EPOCH:
            length, parts = convert(self.time, TimeUnit.BATCH, max_duration, batches).as_integer_ratio()

            def multiples(timestamp: Timestamp) -> int:
                in_epoch = min(timestamp.batch_in_epoch, batches)
                return ((timestamp.epoch * batches + in_epoch) * parts - (in_epoch == batches)) // length

            return multiples
        index = _FIELD_OF_UNIT[unit]
        length, parts = convert(self.time, unit, max_duration, None).as_integer_ratio()
        return lambda timestamp: timestamp[index] * parts // length


class Progress(NamedTuple):
    """The position in training and the run's length; `batches_per_epoch` is None if the loader has no length."""

    timestamp: Timestamp
    max_duration: Time
    batches_per_epoch: int | None = None

    def elapsed_in(self, unit: TimeUnit | str) -> float:
        """Return the count of a unit so far; for `dur`, the fraction of max_duration that has passed.

        Epochs include fractions if the number of batches per epoch is known. The result comes from a single division
        of whole numbers, so 3 of 10 batches give exactly the float 0.3.
        """
        total = self.max_duration.value if unit == TimeUnit.DURATION else 1
        unit = self.max_duration.unit if unit == TimeUnit.DURATION else unit
        if unit == TimeUnit.EPOCH and (batches := self.batches_per_epoch):
            return (self.timestamp.epoch * batches + self.timestamp.batch_in_epoch) / (batches * total)
        return self.timestamp.count(unit) / total

    def convert(self, time: Time | str, unit: TimeUnit | str) -> float:
        """Return the length of `time` in another unit.

        Raises:
            ValueError: there is no conversion between the two units.
        """
        return float(convert(Time.parse(time), unit, self.max_duration, self.batches_per_epoch))
