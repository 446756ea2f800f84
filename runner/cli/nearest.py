"""Finds the nearest allowed name, for messages about a wrong name. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class Advice(str):
    """A phrase about allowed values, with its facts as attributes, which survive concatenation with `+`."""

    allowed: tuple[str, ...] = ()
    """All allowed names."""
    meant: str = ""
    """The nearest allowed name, if any is close."""
    key: str = ""
    """The config key at fault, if known."""
    fix: str = ""
    """The complete argument to type instead of the wrong one, if the nearest name alone is not enough."""

    def with_facts(self, **facts: Any) -> Advice:
        """Return this phrase with further facts."""
        return self._with(str(self), facts)

    def __add__(self, text: str) -> Advice:
        return self._with(str(self) + str(text), vars(text) if isinstance(text, Advice) else {})

    def __radd__(self, text: str) -> Advice:
        return self._with(str(text) + str(self), {})

    def _with(self, text: str, facts: dict[str, Any]) -> Advice:
        advice = Advice(text)
        advice.__dict__.update(self.__dict__ | facts)
        return advice


def advice_in(error: Exception) -> Advice:
    """Return the advice in an exception, or empty advice."""
    arguments = (getattr(error, "reason", ""), *error.args)
    return next((argument for argument in arguments if isinstance(argument, Advice)), Advice())


def nearest(name: str, allowed: Iterable[Any], most: int = 40, otherwise: str = "it has many others") -> Advice:
    """Return a phrase with the nearest allowed name, and with all allowed names unless there are too many.

    If there are more than `most` names and none is close, the phrase is `otherwise`.
    """
    names = sorted(allowed_name for allowed_name in map(str, allowed) if not allowed_name.startswith("_"))
    longer = [candidate for candidate in names if name and candidate.startswith(name)]
    swapped = [candidate for candidate in names if sorted(candidate) == sorted(str(name))]
    small = {candidate.lower(): candidate for candidate in names}
    alike = [small[match] for match in difflib.get_close_matches(str(name).lower(), small, n=1, cutoff=0.6)]
    near = swapped or longer or alike
    facts = {"allowed": tuple(names), "meant": near[0] if near else ""}
    if len(names) > most:
        return Advice(f"did you mean {near[0]!r}?" if near else otherwise).with_facts(**facts)
    listed = ", ".join(names) or "none"
    text = f"did you mean {near[0]!r}? Allowed: {listed}" if near else f"allowed: {listed}"
    return Advice(text).with_facts(**facts)


def fix_of(key: str, meant: str, is_value: bool) -> str:
    """Return the correct argument to type: a key, an option or a word, or a key or option with its value."""
    if not meant or key.isupper():  # a word of the command
        return meant
    if is_value:
        return f"{key} {meant}" if key.startswith("--") else f"{key}={meant}"
    return meant if "." in meant else f"{key.rpartition('.')[0]}.{meant}".removeprefix(".")
