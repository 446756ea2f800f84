"""What training data look like, known before training starts: what they are wrong for is then refused at once."""

from __future__ import annotations

from typing import Any

import torch

from runner.data import TensorLoader


def first_batch(loader: Any) -> Any:
    """Return the first batch of data that lie in memory, as it is before algorithms change it.

    Returns:
        A batch of this rank; None for any other loader, as its reading may take long, or open what workers must open.
    """
    if not isinstance(loader, TensorLoader):
        return None
    with torch.random.fork_rng(devices=[]):  # a transform may draw
        return next(loader.first(1))
