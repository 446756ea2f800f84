"""The first batch of data in memory, which lets an algorithm reject unsuitable data before training starts."""

from __future__ import annotations

from typing import Any

from runner.data import TensorLoader


def first_batch(loader: Any) -> Any:
    """Return this rank's first batch of data in memory, before any algorithm changes it.

    Returns:
        The batch; None for any other loader, because reading may be slow, or open files that only its workers should
        open; None too for a loader with a transform, because that may draw random numbers or count its calls.
    """
    if not isinstance(loader, TensorLoader) or loader.transform is not None:
        return None
    return next(loader.first(1))
