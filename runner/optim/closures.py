"""Refuse optimizers that need a closure to compute the loss, such as torch's LBFGS, unless the model passes one."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

TRAINING_STEP = """
    manual_optimization = True

    def training_step(self, state):
        def closure():
            state.optimizers[0].zero_grad()
            loss = self.loss(self(state.batch), state.batch)
            loss.backward()
            return loss

        return state.optimizers[0].step(closure)"""


def check_closure(optimizer: Optimizer, model: Any) -> None:
    """Check that an optimizer that needs a closure gets one, from a `Model` with `manual_optimization`.

    Raises:
        TypeError: the run would step the optimizer without a closure.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    is_required = closure is not None and closure.default is inspect.Parameter.empty
    if is_required and not getattr(model, "manual_optimization", True):  # with a plain module, nothing is trained
        name = type(optimizer).__name__
        kind = type(model).__name__
        reason = f"its step computes the loss several times. Add this to a subclass of {kind}, and train on one rank"
        raise TypeError(f"optimizers={name}: {reason}:{TRAINING_STEP}")
