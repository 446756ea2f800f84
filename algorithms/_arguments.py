"""Checks of arguments that several algorithms share."""

from __future__ import annotations


def check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Check that an argument is a number in a range.

    Both ends are allowed; with `above`, the lower end is not.

    Raises:
        ValueError: `value` is not a number in the range.
    """
    if isinstance(value, bool) or not low <= value <= high or (above and value == low):
        least = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: must be a number {least}")
