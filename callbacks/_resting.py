"""Lets callbacks that act at an interval rest in between."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runner import Interval, NextCall, TimeUnit

if TYPE_CHECKING:
    from runner import State

NEVER = NextCall(math.inf)
"""The answer of a hook that has nothing to do at its event in this call of `fit`."""


def until_due(interval: Interval, state: State) -> NextCall | None:
    """Return the answer of a hook that acts only where an interval is due.

    None: the interval may be due at any batch, as far as can be told beforehand.
    """
    now = state.timestamp
    if interval.ends_epochs:
        return NEVER if now.batch_in_epoch else None  # never at a batch, but the same hook may handle an epoch's end
    batches = interval.time.value
    return NextCall((now.batch // batches + 1) * batches) if interval.time.unit is TimeUnit.BATCH else None
