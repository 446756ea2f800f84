"""Whether what is about to be saved is finite."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def find_fault(snapshot: dict[str, Any], trained: Collection[str], loss: float) -> str | None:
    """Return what in a checkpoint is NaN or infinite, in a few words, or None.

    Args:
        snapshot: what `capture` returned: the weights to evaluate, and under an average those in training.
        trained: names of the parameters that are trained; all else may hold anything, such as masks of attention.
        loss: of the batch after which it was taken.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    for weights in (snapshot["model.pt"], snapshot.get("state.pt", {}).get("model") or {}):
        for name in weights.keys() & trained:
            tensor = weights[name]
            if tensor.is_meta:  # of a trial
                continue
            # Two numbers and no copy; both are NaN where one element is.
            ends = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax() if tensor.numel() else ()
            if not all(math.isfinite(one) for one in ends):
                return f"the weights are not finite: {name!r}"
    return None
