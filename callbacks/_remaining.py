"""Estimates how many batches a run has."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runner import TimeUnit

if TYPE_CHECKING:
    from runner import State
    from runner.timing.time import Progress

TINY = 1e-6  # tolerance for rounding errors in quotients that should be whole numbers


def known_progress(state: State) -> Progress:
    """Return the progress of training. If the loader has no length, use the mean length of the epochs so far."""
    progress = state.progress
    now = progress.timestamp
    if progress.batches_per_epoch or not now.epoch:
        return progress
    return progress._replace(batches_per_epoch=(now.batch - now.batch_in_epoch) // now.epoch)


def batches_in_run(state: State) -> int | None:
    """Return the number of batches after which training ends, or None if it is not known yet.

    If the run's length is in a unit other than batches and epochs, the number is extrapolated from progress so far.
    """
    end = state.max_duration
    if end.unit is TimeUnit.BATCH:
        return int(end.value)
    if end.unit is TimeUnit.EPOCH and state.train_dataloader_len:  # epochs before this one may have been longer
        now = state.timestamp
        return now.batch - now.batch_in_epoch + (int(end.value) - now.epoch) * state.train_dataloader_len
    fraction = known_progress(state).elapsed_in(TimeUnit.DURATION)
    return math.ceil(state.timestamp.batch / fraction - TINY) if fraction else None
