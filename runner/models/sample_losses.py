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
    """Return the loss of each sample (N,): the model's loss for a batch that contains only that sample.

    `torch.func.vmap` calls the model's loss once for all samples. Therefore the loss must neither read values back from
    the device nor change tensors in place that it did not create. Gradients flow through the result.

    Args:
        model: the model; if it has several losses, the total is used, as in training.
        outputs: the model's outputs for the batch, nested in any way; samples along dimension 0 of each tensor.
        batch: the batch, nested in any way; samples along dimension 0 of each tensor.
    """

    def loss_of_sample(output: Any, sample: Any) -> Tensor:
        single_outputs, single_batch = (map_tensors(part, lambda x: x.unsqueeze(0)) for part in (output, sample))
        return total_of(model.loss(single_outputs, single_batch))

    return torch.func.vmap(loss_of_sample)(outputs, batch)


def worst_samples(losses: Sequence[float] | Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest of N losses, highest first: int64 `(min(count, N),)`.

    NaN counts as higher than any number. Equal losses keep their order.
    """
    return torch.as_tensor(losses, dtype=torch.float64).argsort(descending=True, stable=True)[:count]
