"""Checks of arguments that several algorithms take."""

from __future__ import annotations


def check_range(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raise a ValueError where an argument is no number from `low` to `high`, or (`above`) is `low` itself."""
    if isinstance(value, bool) or not low <= value <= high or (above and value == low):
        least = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ValueError(f"{name}={value!r}: must be a number {least}")
