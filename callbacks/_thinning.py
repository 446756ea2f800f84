"""Looks that are dense at the beginning of a run and rarer later, where most moves early and batches are many."""

from __future__ import annotations

DENSE = 1000
"""The batch up to which looks are dense."""
RARE = 100
"""Batches from one look to the next after it."""


def next_look(often: int, batch: int) -> int:
    """Return the first batch after one that is looked at, both counted from 1.

    Args:
        often: batches from one look to the next up to `DENSE`, which it divides.
        batch: at least 0.
    """
    interval = often if batch < DENSE else RARE
    return (batch // interval + 1) * interval
