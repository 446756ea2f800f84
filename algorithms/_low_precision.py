"""Norms in the type that autocast computes in."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate

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


class LowPrecisionNorm(Algorithm, ABC):
    """Replaces norms of one class; a subclass says which, and by what.

    Args:
        allow_no_match: leave a model without such norms as it is, rather than refuse it.
    """

    runs_after = ("GatedLinearUnits", "QKNorm")  # which may put norms in
    kind: ClassVar[type[nn.Module]]
    """Class of the norms that are replaced; a subclass of it may do something else, and stays."""

    def __init__(self, allow_no_match: bool = False) -> None:
        self.allow_no_match = allow_no_match

    @staticmethod
    @abstractmethod
    def replace(norm: Any, index: int) -> nn.Module:
        """Return what is to stand in place of a norm."""

    def init(self, state: State, logger: Logger) -> None:
        wanted = f"{self.kind.__name__} of torch's own, not derived from it,"
        operate(self, state, {self.kind: self.replace}, wanted, self.allow_no_match)
        if not state.precision.value.startswith("amp"):
            name, precision = type(self).__name__, state.precision.value
            log.warning("%s changes nothing with precision=%s: it is for amp_bf16 and amp_fp16", name, precision)
