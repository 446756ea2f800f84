"""Weights without values yet: each is drawn or read when it is needed, and immediately cut down to this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Draw = Callable[[], Tensor]
"""Returns the value of a weight on the CPU: whole, or a `SavedTensor`, of which a rank reads its part."""
_KEY = "_draw_value"


def defer(parameter: nn.Parameter, draw: Draw) -> None:
    """Register how the value of a parameter is drawn; its memory is undefined until then."""
    vars(parameter)[_KEY] = draw


def is_deferred(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has no value yet."""
    return _KEY in vars(parameter)


def deferred(model: nn.Module) -> dict[str, Draw]:
    """Return functions that draw the values of a model's uninitialized parameters, by name."""
    found: dict[str, Draw] = {}
    for name, one in model.named_parameters():
        if (draw := vars(one).get(_KEY)) is not None:
            found[name] = draw
        if one.is_meta and (draw is None or one._version):
            reason = f"an algorithm or the model's own code changed {name} before it had a value"
            raise ValueError(f"init_weights='by_name': {reason}; set in_order")
    return found


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Draw the values of all parameters that have none yet, whole."""
    for name, draw in deferred(model).items():
        one = model.get_parameter(name)
        one.copy_(draw())
        del vars(one)[_KEY]


def free(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Do as `model.to`, but put parameters that have no values yet on the meta device, without memory."""
    empty: dict[int, nn.Parameter] = {}
    for one in model.parameters():
        if (draw := vars(one).get(_KEY)) is not None:
            its = dtype if dtype is not None and one.is_floating_point() else one.dtype
            empty[id(one)] = nn.Parameter(torch.empty_like(one, dtype=its, device="meta"), one.requires_grad)
            defer(empty[id(one)], draw)
    if not any(one.is_meta for one in empty.values()):
        model.to(device, dtype)
        return
    for module in model.modules():
        _replace(module, empty)
        for one in module.parameters(recurse=False):
            if not one.is_meta:
                one.data = _moved(one.data, device, dtype)
        for name, one in [*module.named_buffers(recurse=False)]:
            setattr(module, name, _moved(one, device, dtype))


def _replace(module: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    for name, one in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
        if id(one) in others and not one.is_meta:
            setattr(module, name, others[id(one)])


def _moved(one: Tensor, device: torch.device, dtype: torch.dtype | None) -> Any:
    return one.to(device, dtype if one.is_floating_point() else None)
