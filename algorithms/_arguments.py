"""Checks of arguments that several algorithms share."""

from __future__ import annotations


def check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Check that an argument is a number in a range.

    Args:
        name: name of the argument, for the message.
        value: value to check.
        low: lower end of the range.
        high: upper end of the range, itself allowed.
        above: whether the value must be greater than `low`; otherwise `low` itself is allowed too.

    Raises:
        ValueError: `value` is not a number in the range.
    """
    if isinstance(value, bool) or not low <= value <= high or (above and value == low):
        least = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: must be a number {least}")
