"""The loss of each sample, from any model's own loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner import Model, State
from runner.batch import map_tensors
from runner.distributed.collectives import broadcast_buffers
from runner.loss import total_of
from runner.model import in_eval_mode


def sample_losses(model: Model, outputs: Any, batch: Any) -> Tensor:
    """Return the loss of each sample by itself (N,): what the model's loss is of a batch of that sample alone.

    The model's loss is run once for all samples, by `torch.func.vmap`: it must not read values back, nor write in
    place into what is not its own. Gradients flow through.

    Args:
        model: whose loss it is; of several losses, the one that is minimized.
        outputs: what the model returned, nested as one likes; dimension 0 of all tensors counts samples.
        batch: likewise.
    """

    def loss_of_one(output: Any, sample: Any) -> Tensor:
        alone = [map_tensors(part, lambda one: one.unsqueeze(0)) for part in (output, sample)]
        return total_of(model.loss(*alone))

    return torch.func.vmap(loss_of_one)(outputs, batch)


@torch.no_grad()
def evaluate_losses(state: State, batch: Any) -> Tensor:
    """Return the loss of each sample of this rank's batch (N,) in evaluation mode. All ranks.

    Nothing of the model is changed, but that all ranks have rank 0's buffers afterwards. Running statistics of the
    other ranks are their own, and are lost in each evaluation and each resume: losses must not depend on them.
    """
    model = state.unwrapped_model
    broadcast_buffers(model)
    with in_eval_mode(model):
        run = state.precision.autocast(state.device)(lambda: sample_losses(model, model(batch), batch))
        return run()
