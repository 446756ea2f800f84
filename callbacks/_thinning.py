"""A schedule of measurements: dense at the beginning of a run, when most changes, and sparse later."""

from __future__ import annotations

DENSE = 1000
"""The batch up to which measurements are dense."""
RARE = 100
"""Batches between two measurements after it."""


def next_measurement(often: int, batch: int) -> int:
    """Return the first batch after `batch` that is measured, counted from 1.

    Args:
        often: batches between two measurements up to `DENSE`; must divide it.
        batch: the current batch, at least 0.
    """
    interval = often if batch < DENSE else RARE
    return (batch // interval + 1) * interval
