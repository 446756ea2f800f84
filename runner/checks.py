"""Checks of arguments and loaders shared by several classes."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from runner.failures.facts import wrong_argument
from runner.time import Interval, Time, TimeUnit

if TYPE_CHECKING:
    import numpy as np

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


def as_step(step: Any) -> int:
    """Return a number of batches, at which something is logged, as an int.

    Raises:
        TypeError: it is not a whole number.
    """
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step={step!r}: must be a whole number of batches") from None


def check_images(images: Any, name: str, captions: Sequence[str] | None) -> np.ndarray:
    """Return images that are logged as an array.

    Raises:
        ValueError: they are not uint8 of shape (N, H, W, C) with C 1 or 3 on the CPU, there is another number of
            captions, or the name is no text.
    """
    import numpy as np

    _check_text(name)
    shape, dtype = getattr(images, "shape", None), getattr(images, "dtype", None)
    value = repr(images) if shape is None or dtype is None else f"{dtype} of shape {tuple(shape)}"
    try:
        array = np.asarray(images)
    except (TypeError, ValueError) as error:  # on another device, or of several sizes
        raise ValueError(f"images={value}: must be one array on the CPU ({error})") from None
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] not in (1, 3) or not array.size:
        allowed = "must be uint8 of shape (N, H, W, C), with C 1 or 3"
        example = "floats from 0 to 1 of shape (N, C, H, W) become (images * 255).round().byte().permute(0, 2, 3, 1)"
        raise ValueError(f"images={value}: {allowed}; {example}")
    if captions is not None and (isinstance(captions, str) or len(captions) != len(array)):
        raise ValueError(f"captions={captions!r}: must be a list with one text for each of {len(array)} images")
    return array


def check_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table that is logged; values of one element are plain numbers.

    Raises:
        ValueError: columns are no list of texts, a row has another number of values, a value is an array, or the name
            is no text.
    """
    _check_text(name)
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"columns={columns!r}: must be a list of names, such as ['image', 'score']")
    if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
        raise ValueError(f"rows={rows!r}: must be a list with a list of values for each row; arrays have tolist()")
    for row in rows:
        if len(row) != len(columns) or any(getattr(value, "shape", ()) for value in row):
            raise ValueError(f"rows=[..., {row!r}, ...]: a row must have a plain value for each of {list(columns)}")
    return [*columns], [[value.item() if hasattr(value, "item") else value for value in row] for row in rows]


def _check_text(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: must be a text, under which this is logged")


def check_named(name: str, values: Mapping[str, Any]) -> None:
    """Check that what is logged is a dict with names as keys.

    Raises:
        TypeError: it is not a mapping, or a key is no text.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"{name}={values!r}: must be a dict of values by name, such as {{'width': 64}}")


def check_file(path: str | Path, folder: str | None) -> Path:
    """Return the path of a file that is logged into a folder of the destination.

    Raises:
        ValueError: there is no such file, or the folder leads out of the destination.
    """
    if not isinstance(path, str | PurePath) or not Path(path).is_file():
        raise ValueError(f"path={str(path)!r}: must be a complete file; a folder is logged file by file")
    if folder is not None and (PurePath(folder).is_absolute() or ".." in PurePath(folder).parts):
        raise ValueError(f"name={folder!r}: must be a folder in the destination, without '..'")
    return Path(path)


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
