"""Checks of arguments that callbacks, algorithms and optimizers take."""

from __future__ import annotations


def check_whole(name: str, value: int, least: int, what: str = "a whole number") -> None:
    """Raise where an argument is no whole number, or below the least that is allowed.

    Args:
        name: the argument's.
        value: as given.
        least: that is allowed.
        what: it counts, for the message: 'a number of batches'.

    Raises:
        ValueError: it is.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be {what}, at least {least}")
