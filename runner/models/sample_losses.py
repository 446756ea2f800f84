"""The loss of each sample of a batch, computed with the model's own loss, and the samples whose loss is highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device.batch import map_tensors
from runner.models.loss import total_of
from runner.models.model import Model


def sample_losses(model: Model, outputs: Any, batch: Any) -> Tensor:
    """Return the loss of each sample (N,): the model's loss for a batch of that sample alone.

    The model's loss is called once for all samples, through `torch.func.vmap`, so it must not read values back from the
    device, nor write in place to tensors that it did not create. Gradients flow through the result.

    Args:
        model: model whose loss is used; of several losses, the one that is minimized.
        outputs: outputs of the model, in any nesting; dimension 0 of each tensor counts samples.
        batch: batch that belongs to the outputs, in any nesting; dimension 0 of each tensor counts samples.
    """

    def loss_of_one(output: Any, sample: Any) -> Tensor:
        alone = [map_tensors(part, lambda one: one.unsqueeze(0)) for part in (output, sample)]
        return total_of(model.loss(*alone))

    return torch.func.vmap(loss_of_one)(outputs, batch)


def worst_samples(losses: Sequence[float] | Tensor, count: int) -> Tensor:
    """Return the places of the highest losses (N,), highest first and NaN before all: int64 `(min(count, N),)`.

    Of equal losses, the earlier comes first.
    """
    return torch.as_tensor(losses, dtype=torch.float64).argsort(descending=True, stable=True)[:count]
