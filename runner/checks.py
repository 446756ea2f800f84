"""Checks of arguments and loaders shared by several classes."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from runner.failures.facts import wrong_argument
from runner.time import Interval, Time, TimeUnit

log = logging.getLogger("runner")

MANY = 10_000  # batches of an evaluation or prediction after which a loader without a length may have no end


def check_whole(name: str, value: int, least: int, what: str = "a whole number") -> None:
    """Check that an argument is a whole number and not too small.

    `what` describes the argument in the message, such as 'a number of batches'.

    Raises:
        ValueError: the value is not a whole number, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong_argument(name, value, f"must be {what}, at least {least}")


def check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Check that an argument is a number in a range.

    Both ends are allowed; with `above`, the lower end is not.

    Raises:
        ValueError: `value` is not a number in the range.
    """
    if isinstance(value, bool) or not low <= value <= high or (above and value == low):
        least = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise wrong_argument(name, value, f"must be a number {least}")


def check_one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check that an argument is one of several names.

    Raises:
        ValueError: it is none of them; the message and the facts list them.
    """
    if value not in allowed:
        typed = str(value).lower()
        longer = [one for one in allowed if typed and typed in one.lower()]
        ratios = {one: difflib.SequenceMatcher(None, one, typed).ratio() for one in allowed}
        nearest = max(allowed, key=ratios.__getitem__)  # of several that are equally near, the first
        near = longer or ([nearest] if ratios[nearest] >= 0.5 else [])
        question = f"; did you mean {near[0]!r}?" if near else ""
        reason = f"must be one of {', '.join(map(repr, allowed))}{question}"
        raise wrong_argument(name, value, reason, allowed=tuple(allowed), meant="".join(near[:1]))


def check_subset(name: str, value: int | None) -> int | None:
    """Return the number of batches to read from a loader; None for all.

    Raises:
        ValueError: the value is neither None nor an int of at least 1.
    """
    if value is not None and (type(value) is not int or value < 1):
        raise wrong_argument(name, value, "must be at least 1, or None for all")
    return value


def check_session(value: str | Time | None, callbacks: Sequence[Any] = (), trains: bool = False) -> float:
    """Return the seconds after which a session ends.

    If the run may train, one of the callbacks must save what a resumed run needs.

    Raises:
        TypeError: the limit is neither a string nor a `Time`.
        ValueError: it is not wall-clock time above 0, or nothing saves a checkpoint.
    """
    if value is None:
        return math.inf
    reason = "must be wall-clock time above 0, such as '2h' or '90s'"
    try:
        limit = Time.parse(value)
    except (TypeError, ValueError) as error:
        raise wrong_argument("session", value, reason, type(error)) from None  # it would suggest epochs
    if limit.unit is not TimeUnit.SECOND or limit.value <= 0:
        raise wrong_argument("session", str(value), reason)
    savers = [one for one in callbacks if hasattr(one, "latest") and not getattr(one, "weights_only", False)]
    if trains and not savers:
        lost = "nothing saves a checkpoint to continue from"
        raise wrong_argument("session", str(value), f"{lost}; add a CheckpointSaver, without weights_only")
    return limit.value


def check_function(name: str, value: Callable[..., Any], allowed: str) -> None:
    """Check that an argument is a function of one argument, not a class with forgotten parentheses.

    Raises:
        TypeError: the value is a class, or takes other arguments.
    """
    try:
        inspect.signature(value).bind("one")
    except TypeError:
        fits = False
    else:
        fits = not isinstance(value, type)
    if not fits:
        function = getattr(value, "func", value)  # of a partial, as a config makes it
        raise wrong_argument(name, getattr(function, "__qualname__", function), f"must be {allowed}", TypeError)


def name_of_loader(label: str) -> str:
    """Return what users call the loader with a label: 'train', an evaluator's label, or 'predict'."""
    names = {"train": "train_dataloader", "predict": "dataloader"}
    return names.get(label, f"dataloader of evaluator {label!r}")


def refuse_one_shot(state: Any) -> None:
    """Refuse a generator, or an iterator of Python's own, that training would read from its beginning more than once.

    Those with a limit of batches are fine: each pass takes the next ones.

    Args:
        state: the State before training.

    Raises:
        ValueError: a loader would be read again before training ends.
    """
    intervals = {"train": (state.train_dataloader, Time(1, TimeUnit.EPOCH))} if not state.train_dataloader_len else {}
    for one in state.evaluators:
        if one.is_on and one.subset_num_batches is None and isinstance(one.eval_interval, Interval):
            intervals[one.label] = one.dataloader, one.eval_interval.time
    length = state.max_duration
    for label, (wrapped, interval) in intervals.items():
        loader = getattr(wrapped, "loader", wrapped)  # inside Sharded or Replicated
        is_fraction = interval.unit is TimeUnit.DURATION
        again = interval.value < 1 if is_fraction else length.unit is interval.unit and interval < length
        if again and hasattr(loader, "__next__") and type(loader).__module__ in ("builtins", "itertools"):
            limit = "train_subset_num_batches" if label == "train" else "Evaluator(subset_num_batches=...)"
            raise ValueError(
                f"{name_of_loader(label)}: this {type(loader).__name__} can be read once, but is needed again after "
                f"'{interval}' of '{length}'; give an object whose __iter__ starts anew, such as a list or a class; "
                f"if it is endless, limit each pass with {limit}"
            )


def warn_if_endless(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield batches, and warn once if there are so many that the loader may be endless."""
    for number, one in enumerate(batches, start=1):
        if number == MANY:
            log.warning("%s: %d batches so far; subset_num_batches limits an endless loader", name, MANY)
        yield one
