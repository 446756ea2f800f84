"""Checks that a checkpoint is finite before it is saved."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def find_fault(snapshot: dict[str, Any], trained: Collection[str], loss: float) -> str | None:
    """Return a short description of NaN or infinite values in a checkpoint, or None if there are none.

    `trained` names the trained parameters; other tensors, such as attention masks, may hold any value.
    """
    from runner.device.numbers import numbers_of

    if not math.isfinite(loss):
        return f"the loss is {loss}"
    for weights in (snapshot["model.pt"], snapshot.get("state.pt", {}).get("model") or {}):
        for name in weights.keys() & trained:
            tensor = weights[name]
            if tensor.is_meta:  # in a trial run
                continue
            tensor = numbers_of(tensor)
            # Two numbers and no copy; both are NaN if any element is.
            ends = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax() if tensor.numel() else ()
            if not all(math.isfinite(one) for one in ends):
                return f"the weights are not finite: {name!r}"
    return None
