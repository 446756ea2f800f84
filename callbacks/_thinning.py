"""Schedules measurements: often at the beginning of a run, when training changes fastest, and rarely later."""

from __future__ import annotations

DENSE = 1000
"""The batch up to which measurements are frequent."""
RARE = 100
"""Batches between two measurements after batch `DENSE`."""


def next_measurement(often: int, batch: int) -> int:
    """Return the first batch to measure after `batch`, counted from 1.

    Args:
        often: batches between two measurements up to batch `DENSE`, which it must divide.
        batch: the current batch, at least 0.
    """
    interval = often if batch < DENSE else RARE
    return (batch // interval + 1) * interval
