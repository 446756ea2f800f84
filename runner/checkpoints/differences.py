"""What does not fit when weights are loaded by name into a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

OTHER_SHAPE = "of another shape"


def differences(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of weights that do not fit a model's own, by kind of difference."""
    kinds = {
        "missing": [key for key in own if key not in found],
        "unexpected": [key for key in found if key not in own],
        OTHER_SHAPE: [
            f"{key} {tuple(found[key].shape)} into {tuple(one.shape)}"
            for key, one in own.items()
            if key in found and found[key].shape != one.shape
        ],
    }
    return {kind: keys for kind, keys in kinds.items() if keys}


def describe_differences(wrong: Mapping[str, Sequence[str]]) -> str:
    """Return what `differences` found as text, with the first three names of each kind."""
    return "; ".join(
        f"{kind} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        for kind, keys in wrong.items()
    )
