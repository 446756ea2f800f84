"""Norms in the type that autocast computes in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from runner import State

log = logging.getLogger("runner")

N = TypeVar("N", nn.LayerNorm, nn.GroupNorm)


def in_low_precision(function: Callable[..., Tensor], inputs: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return `function(inputs, *tensors)` with all of them in autocast's type; as they are where it is off.

    The sums inside a norm are still in 32 bits: torch's kernels accumulate there.
    """
    kind = inputs.device.type
    if not torch.is_autocast_enabled(kind):
        return function(inputs, *tensors)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return function(inputs.to(dtype), *(None if one is None else one.to(dtype) for one in tensors))


def take_over(new: N, old: N) -> N:
    """Return a new norm with the parameters of an old one, not copies: names, optimizers and sharing stay."""
    new.register_parameter("weight", old.weight)
    new.register_parameter("bias", old.bias)
    return new


def warn_without_autocast(name: str, state: State) -> None:
    """Say that an algorithm does nothing where there is no autocast."""
    if not state.precision.value.startswith("amp"):
        log.warning(
            "%s changes nothing with precision=%s: it is for amp_bf16 and amp_fp16", name, state.precision.value
        )
