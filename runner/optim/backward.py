"""The backward pass without what torch checks in Python before it."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def backward(total: Tensor, gradient: Tensor) -> None:
    """Do what `total.backward(gradient)` does, given a gradient of the shape, type and device of `total`.

    Torch compares them by its symbolic shapes. This takes 15 us of host time per step, and importing them, with sympy,
    a quarter of a second before the first. A tensor of another class, such as a DTensor, is left to torch.
    """
    if type(total) is Tensor:
        _engine_run_backward((total,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        total.backward(gradient)
