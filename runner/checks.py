"""Checks of arguments that callbacks, algorithms and optimizers take."""

from __future__ import annotations

from runner.failures import wrong_argument


def check_whole(name: str, value: int, least: int, what: str = "a whole number") -> None:
    """Check that an argument is a whole number and not too small.

    Args:
        name: the argument's name.
        value: the value that was given.
        least: the smallest allowed value.
        what: a description of the argument for the message, such as 'a number of batches'.

    Raises:
        ValueError: the value is not a whole number, or is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong_argument(name, value, f"must be {what}, at least {least}")
