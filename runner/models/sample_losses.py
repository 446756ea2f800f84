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

    The model's loss is called once for all samples, through `torch.func.vmap`. So it must neither read values back from
    the device nor write in place to tensors that it did not create. Gradients flow through the result.

    Args:
        model: the model; of several losses, the total that training minimizes is used.
        outputs: outputs of the model, in any nesting; dimension 0 of each tensor is the sample.
        batch: the batch of these outputs, in any nesting; dimension 0 of each tensor is the sample.
    """

    def loss_of_sample(output: Any, sample: Any) -> Tensor:
        single_outputs, single_batch = (map_tensors(part, lambda x: x.unsqueeze(0)) for part in (output, sample))
        return total_of(model.loss(single_outputs, single_batch))

    return torch.func.vmap(loss_of_sample)(outputs, batch)


def worst_samples(losses: Sequence[float] | Tensor, count: int) -> Tensor:
    """Return the indices of the highest losses `(N,)`, NaN first, then highest first: int64 `(min(count, N),)`.

    Equal losses keep their order.
    """
    return torch.as_tensor(losses, dtype=torch.float64).argsort(descending=True, stable=True)[:count]
