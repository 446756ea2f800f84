"""Weights that have no values yet: each is drawn or read when needed, and cut to this rank's part immediately."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.saved_tensor import as_plain

Draw = Callable[[], Tensor]
"""Returns the value of a weight on the CPU: a whole tensor, or a `SavedTensor`, from which a rank reads its part."""
_KEY = "_draw_value"


def defer(parameter: nn.Parameter, draw: Draw) -> None:
    """Register the function that draws a parameter's value; until it is called, the memory is uninitialized."""
    vars(parameter)[_KEY] = draw


def is_deferred(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has no value yet."""
    return _KEY in vars(parameter)


def value_of(parameter: nn.Parameter) -> Tensor:
    """Return the value of a parameter, drawn or read now if it has none yet."""
    draw = vars(parameter).get(_KEY)
    return parameter if draw is None else as_plain(draw())


def deferred_draws(model: nn.Module) -> dict[str, Draw]:
    """Return functions that draw the values of a model's uninitialized parameters, by name."""
    draws: dict[str, Draw] = {}
    for name, parameter in model.named_parameters():
        if (draw := vars(parameter).get(_KEY)) is not None:
            draws[name] = draw
        if parameter.is_meta and (draw is None or parameter._version):
            reason = f"an algorithm or the model's own code changed {name} before it had a value"
            raise ValueError(f"init_weights='by_name': {reason}; set in_order")
    return draws


@torch.no_grad()
def fill_deferred(model: nn.Module) -> None:
    """Draw the full value of each parameter that has none yet."""
    for name, draw in deferred_draws(model).items():
        parameter = model.get_parameter(name)
        parameter.copy_(draw())
        del vars(parameter)[_KEY]


def move_without_deferred(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move a model like `model.to`, but put parameters without values on the meta device, which takes no memory."""
    placeholders: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        if (draw := vars(parameter).get(_KEY)) is not None:
            target = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            values = torch.empty_like(parameter, dtype=target, device="meta")
            placeholders[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            defer(placeholders[id(parameter)], draw)
    if not any(parameter.is_meta for parameter in placeholders.values()):
        model.to(device, dtype)
        return
    for module in model.modules():
        _replace(module, placeholders)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                parameter.data = _move(parameter.data, device, dtype)
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, _move(buffer, device, dtype))


def _replace(module: nn.Module, replacements: Mapping[int, nn.Parameter]) -> None:
    for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
        if id(parameter) in replacements and not parameter.is_meta:
            setattr(module, name, replacements[id(parameter)])


def _move(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Any:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)
