"""Checks that the values in a checkpoint are finite before it is saved."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def find_fault(snapshot: dict[str, Any], trained: Collection[str], loss: float) -> str | None:
    """Describe NaN or infinite values in a checkpoint; return None if all values are finite.

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
            # The minimum and the maximum need no copy, and both are NaN if any element is.
            extremes = (tensor if tensor.itemsize > 1 else tensor.float()).aminmax() if tensor.numel() else ()
            if not all(math.isfinite(extreme) for extreme in extremes):
                return f"the weights are not finite: {name!r}"
    return None
