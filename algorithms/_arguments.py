"""Checks of arguments that several algorithms take."""

from __future__ import annotations


def check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raise a ValueError where an argument is no number from `low` to `high`, or (`above`) is `low` itself."""
    if isinstance(value, bool) or not low <= value <= high or (above and value == low):
        least = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: must be a number {least}")


def check_whole(name: str, value: int, least: int) -> None:
    """Raise a ValueError where an argument is no whole number, or below the least that is allowed."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number, at least {least}")
