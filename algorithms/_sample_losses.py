"""The loss of each sample in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner import State
from runner.distributed.collectives import broadcast_buffers
from runner.model import in_eval_mode
from runner.models.sample_losses import sample_losses


@torch.no_grad()
def evaluate_losses(state: State, batch: Any) -> Tensor:
    """Return the loss of each sample of this rank's batch (N,) in evaluation mode. Must be called on all ranks.

    The model is left unchanged, except that all ranks have rank 0's buffers afterwards. The running statistics of the
    other ranks are lost at each evaluation and each resume anyway, so the losses must not depend on them.
    """
    model = state.unwrapped_model
    broadcast_buffers(model)
    with in_eval_mode(model):
        run = state.precision.autocast(state.device)(lambda: sample_losses(model, model(batch), batch))
        return run()
