"""Selects runs by conditions, such as `eval/loss<0.2 model=resnet8`, and sorts them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from runner.cli.nearest import nearest
from runner.failures.errors import WrongKey
from runner.records.listing import SavedFolder

_CONDITION = re.compile(r"([\w./@-]+?)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)


@dataclass(frozen=True)
class Condition:
    """A condition on a run. After `=` and `!=`, the value may be a shell pattern, such as `resnet*`."""

    name: str
    sign: str
    value: str

    def holds(self, run: SavedFolder) -> bool:
        """Return whether a run meets the condition; without a value of this name, a run only meets `!=`."""
        value = run.value(self.name)
        if self.sign in ("=", "!="):
            return _equals(value, self.value) is (self.sign == "=")
        number = to_number(value)
        limit = float(self.value)
        if number is None:
            return False
        return {"<": number < limit, "<=": number <= limit, ">": number > limit, ">=": number >= limit}[self.sign]


def parse_conditions(text: str, key: str = "CONDITION") -> list[Condition]:
    """Return the conditions in a text, which are separated by spaces."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise WrongKey(key, f"{error}", repr(text)) from None
    conditions = []
    for part in parts:
        match = _CONDITION.fullmatch(part)
        if match is None:
            reason = "must be name, sign and value without spaces, such as eval/loss<0.2 or model=resnet8"
            raise WrongKey(key, reason, repr(part))
        condition = Condition(*match.groups())
        if condition.sign in ("<", "<=", ">", ">=") and to_number(condition.value) is None:
            raise WrongKey(key, f"{condition.sign} compares numbers; write = for text", repr(part))
        conditions.append(condition)
    return conditions


def choose(runs: Iterable[SavedFolder], conditions: Sequence[Condition], key: str = "CONDITION") -> list[SavedFolder]:
    """Return the runs that meet all conditions."""
    listed = [*runs]
    for condition in conditions:
        _check_known(condition.name, listed, key, f"{condition.name}{condition.sign}{condition.value}")
    return [run for run in listed if all(condition.holds(run) for condition in conditions)]


def in_order(runs: Sequence[SavedFolder], name: str) -> list[SavedFolder]:
    """Return runs sorted by a value, runs without it last.

    With `-` in front of the name, the largest value comes first. Without a name, the latest run comes first.
    """
    if not name:
        return sorted(runs, key=lambda run: (-run.started, str(run.folder)))
    key = name.removeprefix("-")
    _check_known(key, runs, "--sort", name)
    values = {run.folder: run.value(key) for run in runs}
    numbers = {run.folder: to_number(values[run.folder]) for run in runs}
    with_number = [run for run in runs if numbers[run.folder] is not None]
    with_text = [run for run in runs if numbers[run.folder] is None and values[run.folder] is not None]
    without = [run for run in runs if values[run.folder] is None]
    is_reverse = name.startswith("-")
    with_number.sort(key=lambda run: numbers[run.folder] or 0.0, reverse=is_reverse)
    with_text.sort(key=lambda run: str(values[run.folder]), reverse=is_reverse)
    return [*with_number, *with_text, *sorted(without, key=lambda run: str(run.folder))]


def to_number(value: Any) -> float | None:
    """Return a value as a number; None if it is NaN or not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def to_text(value: Any) -> str:
    """Return a value of a config as text for the command line; for a section, the name of its class."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return str(value["_target_"]) if "_target_" in value else ",".join(map(str, value)) or "{}"
    if isinstance(value, list):
        return f"[{','.join(map(to_text, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _equals(value: Any, typed: str) -> bool:
    """Return whether a value matches the typed text: as a number, as a pattern, or in an entry of a list or section."""
    if isinstance(value, list | Mapping) and any(_equals(entry, typed) for entry in value):
        return True
    numbers = to_number(value), to_number(typed)
    return (None not in numbers and numbers[0] == numbers[1]) or fnmatchcase(to_text(value), typed)


def _check_known(name: str, runs: Sequence[SavedFolder], key: str, shown: str) -> None:
    """Refuse a name for which no run has a value."""
    if not runs or any(run.value(name) is not None for run in runs):
        return
    refuse_short_key(name, runs, key, shown)
    names = {name for run in runs for name in run.names}
    near = nearest(name, names).with_facts(meant="")  # only a part of the value is wrong
    raise WrongKey(key, "no run has a value of this name; " + near + ", or a key of a config", repr(shown))


def refuse_short_key(name: str, runs: Sequence[SavedFolder], key: str, shown: str) -> None:
    """Refuse the last part of a typed key, such as `lr`, which is how the table of runs shows `optimizer.lr`."""
    typed = [override.partition("=")[0] for run in runs if run.result is not None for override in run.result.overrides]
    if long := sorted({text.lstrip("+~") for text in typed if text.endswith(f".{name}")}):
        raise WrongKey(key, f"no run has a value of this name; write {' or '.join(long)}", repr(shown))
