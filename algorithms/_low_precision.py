"""Norms that run in autocast's dtype."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State, get_global_rank
from runner.algorithms._surgery import operate

log = logging.getLogger("runner")

N = TypeVar("N", nn.LayerNorm, nn.GroupNorm)


def in_low_precision(function: Callable[..., Tensor], inputs: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return `function(inputs, *tensors)` with all tensors in autocast's dtype, or unchanged if autocast is off.

    Sums inside a norm stay in float32, because torch's kernels accumulate in it.
    """
    kind = inputs.device.type
    if not torch.is_autocast_enabled(kind):
        return function(inputs, *tensors)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return function(inputs.to(dtype), *(None if tensor is None else tensor.to(dtype) for tensor in tensors))


def take_over(new: N, old: N) -> N:
    """Return the new norm with the old norm's parameters, so that names, optimizers and weight sharing still hold."""
    new.register_parameter("weight", old.weight)
    new.register_parameter("bias", old.bias)
    return new


class LowPrecisionNorm(Algorithm, ABC):
    """Base class of algorithms that replace the norms of one class; a subclass defines which, and the replacement."""

    runs_after = ("GatedLinearUnits", "QKNorm")  # these may add norms
    kind: ClassVar[type[nn.Module]]
    """Class of the norms to replace. Its subclasses stay, because they may compute something else."""

    def __init__(self, allow_no_match: bool = False) -> None:
        self.allow_no_match = allow_no_match

    @staticmethod
    @abstractmethod
    def replace(norm: Any, index: int) -> nn.Module:
        """Return the module that replaces a norm."""

    def init(self, state: State, logger: Logger) -> None:
        target = f"{self.kind.__name__} (a subclass does not count)"
        operate(self, state, {self.kind: self.replace}, target, self.allow_no_match)
        if not state.precision.value.startswith("amp") and get_global_rank() == 0:
            log.warning(
                "%s changes nothing with precision=%s: it is for amp_bf16 and amp_fp16",
                type(self).__name__,
                state.precision.value,
            )
