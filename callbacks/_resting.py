"""When callbacks that act at an interval need to be called next."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runner import Interval, NextCall, TimeUnit

if TYPE_CHECKING:
    from runner import State

NEVER = NextCall(math.inf)
"""What a hook returns that has nothing to do at its event for the rest of this call of `fit`."""


def until_due(interval: Interval, state: State) -> NextCall | None:
    """Return when a hook that acts only when an interval is due needs to be called next, for the hook to return.

    None means at each batch, because one cannot tell in advance when the interval is due.
    """
    now = state.timestamp
    if interval.ends_epochs:
        return NEVER if now.batch_in_epoch else None  # never at a batch, but the same hook may handle an epoch's end
    batches = interval.time.value
    return NextCall((now.batch // batches + 1) * batches) if interval.time.unit is TimeUnit.BATCH else None
