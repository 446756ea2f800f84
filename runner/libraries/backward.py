"""Start a backward pass from a given gradient, without torch's checks of it.

These compare its shape with that of the loss. In the first batch they import SymPy, which takes 0.2 s; in each later
batch they take 10 us of host time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph

from runner.libraries.shortcuts import is_enabled


def backward(loss: Tensor, gradient: Tensor) -> None:
    """Call `loss.backward(gradient)`, with a gradient of the shape and dtype of the loss."""
    if type(loss) is Tensor and _runs_as_expected():
        _run(loss, gradient)
    else:
        loss.backward(gradient)


def _run(loss: Tensor, gradient: Tensor) -> None:
    # Neither retains nor creates a graph, and adds to `.grad` of all leaves.
    run: Any = graph._engine_run_backward
    run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@cache
def _runs_as_expected() -> bool:
    """Return whether to take the shortcut: this torch has the private function, and it takes these arguments."""
    if not is_enabled("backward"):
        return False
    weight = torch.ones((), requires_grad=True)
    try:
        _run(2 * weight, torch.ones(()))
    except (AttributeError, TypeError, RuntimeError):
        return False
    return weight.grad is not None and weight.grad.tolist() == 2
