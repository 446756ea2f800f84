"""Prepares the model for inference, for callbacks that use it during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runner import State, evaluation_weights
from runner.models.model import in_eval_mode


@contextmanager
def inference(state: State) -> Iterator[None]:
    """Put the model into evaluation mode, with its evaluation weights and no gradients, and restore it afterwards."""
    with in_eval_mode(state.unwrapped_model), torch.no_grad(), evaluation_weights(state):
        yield
