"""The model as it is evaluated, for a callback that asks it something in the middle of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from runner import evaluation_weights

if TYPE_CHECKING:
    from runner import State


@contextmanager
def inference(state: State) -> Iterator[None]:
    """Inside, the model is in evaluation mode with the weights to evaluate, without gradients; after, as before."""
    modes = [(module, module.training) for module in state.unwrapped_model.modules()]
    state.unwrapped_model.eval()
    try:
        with torch.no_grad(), evaluation_weights(state):
            yield
    finally:
        for module, training in modes:
            module.training = training
