"""Checks of arguments and loaders shared by several classes."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from runner.failures.errors import WrongType, wrong_argument
from runner.timing.time import Interval, Time, TimeUnit

log = logging.getLogger("runner")

F = TypeVar("F", bound=Callable[..., Any])
MANY = 10_000  # batches after which a loader without a length seems endless, in evaluations and predictions


def refuse_if(wrong: Any, name: str, value: Any, reason: str, kind: type[Exception] = ValueError) -> None:
    """Raise an exception with the message `name=value: reason` if an argument is wrong."""
    if wrong:
        raise wrong_argument(name, value, reason, kind)


def check_whole(
    name: str, value: Any, least: int, what: str = "a whole number", none: str = "", most: float = math.inf
) -> None:
    """Check that an argument is a whole number in a range.

    In the message, `what` describes the argument, such as 'a number of batches', and `none` says what None stands for;
    without `none`, the argument must not be None.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and least <= value <= most) and not (value is None and none):
        span = f", at least {least}" if most == math.inf else f" from {least} to {most}"
        raise wrong_argument(name, value, f"must be {what}{span}{_or_none(none)}")


def check_counts(**values: Any) -> None:
    """Check that arguments, given by name, are whole numbers of at least 1."""
    for name, value in values.items():
        check_whole(name, value, 1)


def check_number(name: str, value: Any, interval: str, what: str = "a number", none: str = "") -> None:
    """Check that an argument is a number in an interval.

    In the notation of `interval`, `'[0, 1)'` includes 0 but not 1, `'(0, inf)'` means any finite number above 0, and
    `'(0, inf]'` includes infinity too. `what` and `none` are as in `check_whole`.
    """
    low, high = map(float, interval[1:-1].split(","))
    excluded = [end for end, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "()"]
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and low <= float(value) <= high and value not in excluded) and not (value is None and none):
        raise wrong_argument(name, value, f"must be {_in_words(interval, what)}{_or_none(none)}")


def check_numbers(interval: str, what: str = "a number", **values: Any) -> None:
    """Check that arguments, given by name, are numbers in an interval, as `check_number` does."""
    for name, value in values.items():
        check_number(name, value, interval, what)


def _in_words(interval: str, what: str) -> str:
    low, high = interval[1:-1].split(", ")
    if high == "inf":
        what = what.replace("a ", "a finite ", 1) if interval.endswith(")") else what
        return what if low == "-inf" else f"{what} above {low}" if interval[0] == "(" else f"{what}, at least {low}"
    if interval[0] == "(":
        return f"{what} above {low} and {'below' if interval[-1] == ')' else 'at most'} {high}"
    return f"{what}, at least {low} and below {high}" if interval[-1] == ")" else f"{what} from {low} to {high}"


def _or_none(meaning: str) -> str:
    return f", or None for {meaning}" if meaning else ""


def check_one_of(name: str, value: Any, allowed: Collection[str | None]) -> None:
    """Check that an argument is one of the allowed names, which may include None."""
    if value not in allowed:
        names = [other for other in allowed if other is not None]
        typed = str(value).lower()
        containing = [other for other in names if typed and typed in other.lower()]
        ratios = {other: difflib.SequenceMatcher(None, other, typed).ratio() for other in names}
        nearest = max(names, key=ratios.__getitem__)  # if several are equally near, the first
        near = containing or ([nearest] if ratios[nearest] >= 0.5 else [])
        question = f"; did you mean {near[0]!r}?" if near else ""
        reason = f"must be one of {', '.join(map(repr, allowed))}{question}"
        listed = tuple("null" if other is None else other for other in allowed)
        raise wrong_argument(name, value, reason, allowed=listed, meant="".join(near[:1]))


def check_keys(name: str, value: Mapping[str, Any], known: Collection[str], owner: str) -> None:
    """Check that a mapping has only known keys; in the message, `owner` is what the keys belong to."""
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise wrong_argument(name, dict(value), f"{owner} has no {key!r}; did you mean {near!r}?")


def refusing_unknown(about: str) -> Callable[[F], F]:
    """Return a decorator that lets a constructor refuse unknown arguments with advice.

    Args:
        about: the path of a function from the argument's name, its value and the known names to the advice.
    """

    def decorate(init: Any) -> Any:
        known = inspect.signature(init).parameters

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **arguments: Any) -> None:
            for name, value in arguments.items():
                if name not in known:
                    shown = repr(value) if isinstance(value, str | float | int | None) else type(value).__name__
                    reason = f"no such argument; {resolve_name(about)(name, value, known)}"
                    raise WrongType(f"{name}={shown}: {reason}", name, value, reason)
            init(self, *args, **arguments)

        return checked

    return decorate


def check_flag(name: str, value: Any, none: str) -> None:
    """Check that an argument is True, False or None; `none` completes 'None, which ...' in the message."""
    refuse_if(
        value is not None and not isinstance(value, bool), name, value, f"must be True, False, or None, which {none}"
    )


def check_list(name: str, value: Any, what: str = "names") -> None:
    """Check that an argument that takes a list is not a single string."""
    refuse_if(isinstance(value, str), name, value, f"must be a list of {what}, such as [{value!r}]")


def check_inner_path(name: str, value: str, example: str) -> None:
    """Check that an argument is a path that stays inside the run's folder."""
    path = Path(value)
    leaves = not value or path.is_absolute() or ".." in path.parts
    refuse_if(leaves, name, value, f"must be a path inside the run's folder, such as {example!r}")


def parse_interval(name: str, value: int | str | Time, example: str) -> Interval:
    """Return an interval. An interval of 0 is refused, because it would mean never."""
    interval = Interval(value, name)
    refuse_if(not interval.time.value, name, value, f"must be a time above 0, such as {example!r}")
    return interval


def check_subset(name: str, value: int | None) -> int | None:
    """Check and return the number of batches to read from a loader; None means all."""
    check_whole(name, value, 1, none="all")
    return value


def check_session(value: str | Time | None, callbacks: Sequence[Any] = (), trains: bool = False) -> float:
    """Return the seconds after which a session ends.

    If the run may train, one of the callbacks must save what a resumed run needs.
    """
    if value is None:
        return math.inf
    reason = "must be wall-clock time above 0, such as '2h' or '90s'"
    try:
        limit = Time.parse(value)
    except (TypeError, ValueError) as error:
        raise wrong_argument("session", value, reason, type(error)) from None  # the original message suggests epochs
    if limit.unit is not TimeUnit.SECOND or limit.value <= 0:
        raise wrong_argument("session", str(value), reason)
    savers = [saver for saver in callbacks if hasattr(saver, "latest") and not getattr(saver, "weights_only", False)]
    if trains and not savers:
        lost = "nothing saves a checkpoint to continue from"
        raise wrong_argument("session", str(value), f"{lost}; add a CheckpointSaver, without weights_only")
    return limit.value


def check_function(name: str, value: Callable[..., Any], allowed: str) -> None:
    """Check that an argument is a function of one argument, not a class whose parentheses were forgotten."""
    try:
        inspect.signature(value).bind("one")
    except TypeError:
        fits = False
    else:
        fits = not isinstance(value, type)
    if not fits:
        function = getattr(value, "func", value)  # functions in configs are partials
        raise wrong_argument(name, getattr(function, "__qualname__", function), f"must be {allowed}", TypeError)


def name_of_loader(label: str) -> str:
    """Return the name by which users know a loader. Its label is 'train', 'predict' or that of an evaluator."""
    names = {"train": "train_dataloader", "predict": "dataloader"}
    return names.get(label, f"dataloader of evaluator {label!r}")


def refuse_one_shot(state: Any) -> None:
    """Refuse a generator or a built-in iterator if training would have to start it over.

    If the number of batches per pass is limited, it is allowed: each pass continues after the previous one.

    Args:
        state: the State before training.
    """
    intervals = {"train": (state.train_dataloader, Time(1, TimeUnit.EPOCH))} if not state.train_dataloader_len else {}
    for evaluator in state.evaluators:
        if evaluator.is_on and evaluator.subset_num_batches is None and isinstance(evaluator.eval_interval, Interval):
            intervals[evaluator.label] = evaluator.dataloader, evaluator.eval_interval.time
    length = state.max_duration
    for label, (wrapped, interval) in intervals.items():
        loader = getattr(wrapped, "loader", wrapped)  # inside Sharded or Replicated
        is_fraction = interval.unit is TimeUnit.DURATION
        again = interval.value < 1 if is_fraction else length.unit is interval.unit and interval < length
        if again and hasattr(loader, "__next__") and type(loader).__module__ in ("builtins", "itertools"):
            limit = "train_subset_num_batches" if label == "train" else "Evaluator(subset_num_batches=...)"
            raise ValueError(
                f"{name_of_loader(label)}: this {type(loader).__name__} can be read only once, but is needed again "
                f"after '{interval}' of '{length}'; give an object whose __iter__ starts over, such as a list, or an "
                f"instance of a class of your own; if it is endless, limit each pass with {limit}"
            )


def warn_if_endless(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield batches, and warn once if there are so many that the loader may be endless."""
    for number, batch in enumerate(batches, start=1):
        if number == MANY:
            log.warning("%s: %d batches so far; subset_num_batches limits an endless loader", name, MANY)
        yield batch
