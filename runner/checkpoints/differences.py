"""What does not fit when weights are loaded by name into a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

OTHER_SHAPE = "of another shape"


def differences(weights: Mapping[str, Any], model: nn.Module, ignored: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the names of weights that do not fit a model's own, by kind of difference, without `ignored` ones.

    Shapes are compared only where they are fixed: not in what `get_extra_state` returned, nor in a module that loads
    its state itself, such as an observer of torch's quantization.
    """
    own = {key: value for key, value in model.state_dict().items() if key not in ignored}
    fixed = _with_fixed_shapes(model, own)
    kinds = {
        "missing": [key for key in own if key not in weights],
        "unexpected": [key for key in weights if key not in own],
        OTHER_SHAPE: [
            f"{key} {_shape_of(weights[key])} into {_shape_of(own[key])}"
            for key in fixed
            if key in weights and _shape_of(weights[key]) != _shape_of(own[key])
        ],
    }
    return {kind: keys for kind, keys in kinds.items() if keys}


def describe_differences(wrong: Mapping[str, Sequence[str]]) -> str:
    """Return what `differences` found as text, with the first three names of each kind."""
    return "; ".join(
        f"{kind} {', '.join(keys[:3])}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
        for kind, keys in wrong.items()
    )


def _with_fixed_shapes(model: nn.Module, own: Mapping[str, Any]) -> list[str]:
    """Return the names in a model's own state whose values cannot be loaded with another shape."""
    free = {name for name, module in model.named_modules() if _loads_itself(module)}
    return [
        key
        for key, value in own.items()
        if isinstance(value, Tensor) and not key.endswith("_extra_state") and key.rpartition(".")[0] not in free
    ]


def _loads_itself(module: nn.Module) -> bool:
    return not type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")


def _shape_of(value: Any) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
