"""Selects parameters and weights by shell patterns for their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from runner.failures.errors import wrong_argument


def select_names(key: str, patterns: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the names that patterns select: each adds the names it matches, or removes them if it begins with `!`.

    Args:
        key: name of the argument that has the patterns, for errors.
        patterns: shell patterns in order; the last one that matches a name decides.
        names: all names.

    Raises:
        ValueError: a pattern matches no name.
    """
    selected: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if matches_name(name, pattern)}
        if not matched:
            raise wrong_argument(key, pattern, f"no weight has this name; near: {near_names(pattern, names)}")
        selected = selected - matched if pattern.startswith("!") else selected | matched
    return selected


def matches_name(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name, with or without `!`."""
    return fnmatchcase(name, pattern.removeprefix("!"))


def near_names(pattern: str, names: Sequence[str]) -> str:
    """Return the names most similar to a pattern, for a message."""
    return ", ".join(get_close_matches(pattern.removeprefix("!"), names, n=3, cutoff=0.3) or names[:3])
