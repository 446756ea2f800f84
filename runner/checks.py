"""Checks of arguments that callbacks, algorithms and optimizers take."""

from __future__ import annotations

from runner.failures import wrong_argument


def check_whole(name: str, value: int, least: int, what: str = "a whole number") -> None:
    """Raise where an argument is not a whole number, or is below the least that is allowed.

    Args:
        name: the argument's name.
        value: as it was given.
        least: the smallest number that is allowed.
        what: what the argument is, for the message, such as 'a number of batches'.

    Raises:
        ValueError: the value is not a whole number, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong_argument(name, value, f"must be {what}, at least {least}")
