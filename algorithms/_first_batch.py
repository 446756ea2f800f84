"""What training data look like, known before training starts: what they are wrong for is then refused at once."""

from __future__ import annotations

from typing import Any

from runner.data import TensorLoader


def first_batch(loader: Any) -> Any:
    """Return the first batch of data that lie in memory, as it is before algorithms change it.

    Returns:
        A batch of this rank; None for any other loader, as its reading may take long, or open what workers must open,
        and where a transform, which may draw or count, makes the batches.
    """
    if not isinstance(loader, TensorLoader) or loader.transform is not None:
        return None
    return next(loader.first(1))
