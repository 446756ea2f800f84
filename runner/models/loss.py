"""Losses: the quantity to minimize, and the weight of each microbatch and each rank.

The gradient of a batch is the mean over the items that its loss averages over, however the batch is split into
microbatches and spread over ranks. The items are samples, or, say, target tokens if a model overrides `loss_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed.ranks import get_data_parallel_group
from runner.models.model import Model

Weight = float | Tensor
Share = Callable[[], Weight]
"""Returns a part of a batch of all ranks, once the forward pass has been queued; it may have to wait for the ranks."""


def total_of(loss: Tensor | dict[str, Tensor]) -> Tensor:
    """Return the tensor to minimize: the loss itself or, from a dict, the entry 'total' or else the sum of all."""
    if isinstance(loss, Tensor):
        return loss
    return loss["total"] if "total" in loss else sum(loss.values())  # type: ignore[return-value]


def root_gradient(total: Tensor, scale: Weight, kept: dict[float, Tensor]) -> Tensor:
    """Return the gradient from which the backward pass of `scale * total` starts at `total`: the scale itself.

    Given to `total.backward`, it spares the device the product and its own backward pass.

    Args:
        total: the tensor to minimize.
        scale: a number, or a zero-dimensional tensor.
        kept: the gradients made so far, by number; it spares the device a new one for each batch.
    """
    if isinstance(scale, Tensor):
        return scale.to(total.dtype)
    if scale not in kept:
        kept[scale] = torch.full_like(total, scale)
    return kept[scale]


def weighted_sum(
    losses: Sequence[tuple[Tensor, dict[str, Tensor]]], weights: Sequence[Weight]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum of losses in the form that `detach` returns: the total, and the parts by name."""
    pairs = list(zip(losses, weights, strict=True))
    total = torch.stack([total * weight for (total, _), weight in pairs]).sum()
    parts = {name: torch.stack([part[name] * weight for (_, part), weight in pairs]).sum() for name in losses[0][1]}
    return total, parts


def detach(loss: Tensor | dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the total of a loss and its parts by name, detached from the graph."""
    if isinstance(loss, Tensor):
        return loss.detach(), {}
    return total_of(loss).detach(), {name: value.detach() for name, value in loss.items() if name != "total"}


def fractions(model: Model, microbatches: Sequence[Any]) -> list[Weight]:
    """Return each microbatch's fraction of this rank's batch, by loss weight; the fractions add up to 1."""
    weights = [_exact(model.loss_weight(microbatch)) for microbatch in microbatches]
    total = sum(weights)
    total = torch.where(total > 0, total, 1) if isinstance(total, Tensor) else total or 1.0
    return [weight / total for weight in weights]


def rank_share(model: Model, batch: Any, samples: int, all_samples: int, ranks: int, by_samples: bool) -> Share:
    """Return a function for this rank's fraction of the batch of all ranks, by loss weight, times the number of ranks.

    DDP averages gradients over ranks, so 1 is right if all ranks have equal weights. The sampler knows how many samples
    each rank has. If the loss averages over something of which samples may have different amounts, the ranks sum one
    number, on the device, beside the forward pass: only the function waits for it. All ranks. `samples` is 0 if the
    batch only stands in for an empty share; for `by_samples` see `weigh_alike`.
    """
    if ranks == 1 or by_samples:
        known = samples * ranks / all_samples if ranks > 1 else 1.0
        return lambda: known
    mine = _exact(model.loss_weight(batch)) if samples else 0.0
    device = next(model.parameters()).device
    mine = mine if isinstance(mine, Tensor) else torch.full((), mine, dtype=_float(device), device=device)
    everyones = mine.clone()
    work: Any = dist.all_reduce(everyones, group=get_data_parallel_group(), async_op=True)

    @cache
    def share() -> Weight:
        work.wait()
        return mine * ranks / torch.where(everyones > 0, everyones, 1)

    return share


def _exact(weight: float | Tensor) -> Weight:
    """Return a weight in double precision if the device has it, so that counts are not rounded to 24 bits."""
    return weight.detach().to(_float(weight.device)) if isinstance(weight, Tensor) else float(weight)


def _float(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
