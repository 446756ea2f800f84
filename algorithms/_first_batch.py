"""Checks the first training batch before training starts, so that unsuitable data is rejected immediately."""

from __future__ import annotations

from typing import Any

from runner.data import TensorLoader


def first_batch(loader: Any) -> Any:
    """Return the first batch of data that are held in memory, before any algorithm changes it.

    Returns:
        A batch of this rank. None for any other loader, because reading from it may be slow, or may open what its
        workers must open themselves; also None if a transform makes the batches, because it may draw random numbers or
        keep count.
    """
    if not isinstance(loader, TensorLoader) or loader.transform is not None:
        return None
    return next(loader.first(1))
