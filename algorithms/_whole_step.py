"""The forward pass of training and its loss as one function, which can be compiled or recorded as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner import Model, State
from runner.core.engine import overrides
from runner.distributed.sharding import is_sharded

Step = Callable[[Any], tuple[Any, Any]]
"""Computes the outputs for a batch and their loss."""
HOOKS_BETWEEN = ("after_forward", "before_loss", "run_event", "match", "apply")
"""Methods with which an algorithm may act between the forward pass and the loss."""


def check_can_join(state: State, name: str, remedy: str) -> None:
    """Raise a ValueError if a run needs the forward pass and the loss as separate functions."""
    between = [
        type(algorithm).__name__
        for algorithm in state.algorithms
        if any(overrides(algorithm, hook) for hook in HOOKS_BETWEEN)
    ]
    model = state.unwrapped_model
    reasons = [
        *(f"{algorithm} acts between the forward pass and the loss" for algorithm in between),
        *(["each rank has a part of the weights"] if is_sharded(model) else []),
        *([f"{type(model).__name__} has its own training_step"] if model.training_step is not None else []),
    ]
    if reasons:
        raise ValueError(f"{name}: {reasons[0]}; {remedy}")


def join_loss(model: Model, run: Callable[[Step, Any], tuple[Any, Any]] = lambda step, batch: step(batch)) -> None:
    """Make the forward pass of a model compute the loss too, in training; its method `loss` then returns that loss.

    Args:
        model: the model. Its class is replaced by a subclass of the same name.
        run: called with a function that computes outputs and loss, and with the batch to call it with.
    """
    base: Any = type(model)

    class WithLoss(base):
        _joined: Any = None  # outputs and their loss

        def forward(self, batch: Any) -> Any:
            if not self.training:
                return super().forward(batch)
            outputs, loss = run(self._step, batch)
            self._joined = outputs, loss
            return outputs

        def loss(self, outputs: Any, batch: Any) -> Any:
            joined = self._joined
            self._joined = None
            if joined is not None and joined[0] is outputs:
                return joined[1]
            return super().loss(outputs, batch)  # in an evaluation, or if DDP has wrapped the outputs

        def _step(self, batch: Any) -> tuple[Any, Any]:
            outputs = super().forward(batch)
            return outputs, super().loss(outputs, batch)

    WithLoss.__name__ = base.__name__
    WithLoss.__qualname__ = base.__qualname__
    model.__class__ = WithLoss
