"""The forward pass of training together with its loss, as one function, which can be compiled or kept as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner import Model, State
from runner.core.engine import overrides
from runner.distributed.sharding import is_sharded

Step = Callable[[Any], tuple[Any, Any]]
"""Returns the outputs for a batch and their loss."""
BETWEEN = ("after_forward", "before_loss", "run_event", "match", "apply")
"""The hooks of an algorithm that may act between the forward pass and the loss."""


def refuse_what_needs_parts(state: State, what: str, remedy: str) -> None:
    """Check that nothing in a run needs the forward pass and the loss to be separate."""
    between = [type(one).__name__ for one in state.algorithms if any(overrides(one, name) for name in BETWEEN)]
    model = state.unwrapped_model
    why = [
        *(f"{name} acts between the forward pass and the loss" for name in between),
        *(["each rank has a part of the weights"] if is_sharded(model) else []),
        *([f"{type(model).__name__} has its own training_step"] if model.training_step is not None else []),
    ]
    if why:
        raise ValueError(f"{what}: {why[0]}; {remedy}")


def join_loss(model: Model, run: Callable[[Step, Any], tuple[Any, Any]] = lambda step, batch: step(batch)) -> None:
    """Let the forward pass of a model compute its loss too, in training; its method `loss` then returns that.

    Args:
        model: the model, whose class changes, but not its name.
        run: how outputs and loss of a batch are computed, given the function that does it.
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
            return super().loss(outputs, batch)  # of an evaluation, or where DDP has wrapped the outputs

        def _step(self, batch: Any) -> tuple[Any, Any]:
            outputs = super().forward(batch)
            return outputs, super().loss(outputs, batch)

    WithLoss.__name__ = base.__name__
    WithLoss.__qualname__ = base.__qualname__
    model.__class__ = WithLoss
