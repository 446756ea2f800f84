"""A model that computes nothing, to time the rest of a run, especially the data."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import LAYER_SURGERY, operate
from runner.device.batch import map_tensors, tensors


class _Constant(nn.Module):
    """Returns a single number, its only weight, in the shapes of another module's outputs.

    The other module runs once, at the first call, and is then released. Leading dimensions that its output shares with
    its input, such as samples and tokens, follow each later input.

    Args:
        module: module to replace.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        like = next(module.parameters())
        self.value = nn.Parameter(torch.zeros(1, device=like.device, dtype=like.dtype))  # scalars cannot be sharded
        self._module = [module]  # in a list, so that it is not registered as a child
        self._outputs: Any = None
        self._inputs = torch.Size()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return outputs whose elements all equal the number."""
        shape = next(tensors([*args, *kwargs.values()])).shape
        if self._module:
            with torch.no_grad():
                outputs = self._module.pop().eval()(*args, **kwargs)
            self._outputs = map_tensors(outputs, lambda tensor: torch.empty_like(tensor, device="meta"))
            self._inputs = shape

        def fill(like: Tensor) -> Tensor:
            common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(like.shape, self._inputs, strict=False))])
            # A copy, because a sharded model frees its weights, and views of them, after the forward pass.
            filled = self.value[0].expand((*shape[:common], *like.shape[common:])).clone()
            return filled if like.is_floating_point() else filled.to(like.dtype)

        return map_tensors(self._outputs, fill)


class NoOpModel(Algorithm):
    """Replaces each part of the model with a constant, to time the rest of a run: data, callbacks, checkpoints.

    Loss and metrics are computed as usual, from outputs that are all equal. Each real part runs once, to learn its
    shapes.

    Raises:
        ValueError: at INIT, no part of the model has weights.

    Evidence:
        None, because nothing is learned.
    """

    runs_after = (*LAYER_SURGERY, "StochasticDepth", "ActivationCheckpointing", "ChannelsLast")
    conflicts_with = ("Compile", "WeightStandardization")  # model surgery refuses to drop parametrizations

    def init(self, state: State, logger: Logger) -> None:
        parts = {child for child in state.unwrapped_model.children() if [*child.parameters()]}
        if not parts:
            raise ValueError(
                "NoOpModel finds no part with weights in the model, so there is nothing to replace: remove NoOpModel"
            )
        operate(self, state, {parts.__contains__: lambda part, index: _Constant(part)}, "part with weights")
