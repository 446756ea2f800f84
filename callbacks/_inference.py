"""The model as it is evaluated, for a callback that asks it something in the middle of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from runner import evaluation_weights
from runner.model import in_eval_mode

if TYPE_CHECKING:
    from runner import State


@contextmanager
def inference(state: State) -> Iterator[None]:
    """Inside, the model is in evaluation mode with the weights to evaluate, without gradients; after, as before."""
    with in_eval_mode(state.unwrapped_model), torch.no_grad(), evaluation_weights(state):
        yield
