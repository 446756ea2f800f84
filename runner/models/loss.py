"""Losses: the quantity to minimize, and the weight of each microbatch and each rank.

A loss L is a mean over w items: samples, or for example target tokens if the model overrides `loss_weight`. For a batch
split into parts with losses L_i over w_i items, the mean over all items is sum_i (w_i / W) L_i, with W = sum_i w_i.
So each microbatch's loss is multiplied by its `fractions` entry w_i / W. DDP averages over R ranks instead of summing,
so each rank's loss is multiplied by its `rank_share` R w_r / W. The gradient is then that of the whole batch.
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
"""Returns the factor of `rank_share`. Call it after the forward pass has been queued: it may wait for the ranks."""


def total_of(loss: Tensor | dict[str, Tensor]) -> Tensor:
    """Return the tensor to minimize: the loss itself or, of a dict, the entry 'total' or else the sum of all."""
    if isinstance(loss, Tensor):
        return loss
    return loss["total"] if "total" in loss else sum(loss.values())  # type: ignore[return-value]


def root_gradient(total: Tensor, scale: Weight, kept: dict[float, Tensor]) -> Tensor:
    """Return the gradient of `scale * total` with respect to `total`, which is the scale itself.

    Passing it to `total.backward` spares the device the product and its backward pass.

    Args:
        total: the tensor to minimize.
        scale: a number, or a zero-dimensional tensor.
        kept: a cache of gradients by number, which spares the device a new tensor for each batch.
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
    """Return each microbatch's fraction of the loss weight of this rank's batch; the fractions add up to 1."""
    weights = [_exact(model.loss_weight(microbatch)) for microbatch in microbatches]
    total = sum(weights)
    total = torch.where(total > 0, total, 1) if isinstance(total, Tensor) else total or 1.0
    return [weight / total for weight in weights]


def rank_share(model: Model, batch: Any, samples: int, all_samples: int, ranks: int, by_samples: bool) -> Share:
    """Return a function for this rank's fraction of the loss weight of all ranks, times the number of ranks. All ranks.

    It is 1 if all ranks have equal weights. If weights are numbers of samples, the sampler knows them. Otherwise the
    ranks sum their weights on the device, in parallel with the forward pass; only the returned function waits for the
    sum.

    Args:
        model: the model, for its `loss_weight`.
        batch: this rank's batch.
        samples: samples in this rank's share; 0 if the batch only stands in for an empty share.
        all_samples: samples in the batch of all ranks.
        ranks: number of ranks.
        by_samples: whether weights are numbers of samples; see `weigh_alike`.
    """
    if ranks == 1 or by_samples:
        known = samples * ranks / all_samples if ranks > 1 else 1.0
        return lambda: known
    weight = _exact(model.loss_weight(batch)) if samples else 0.0
    device = next(model.parameters()).device
    weight = weight if isinstance(weight, Tensor) else torch.full((), weight, dtype=_float(device), device=device)
    total = weight.clone()
    work: Any = dist.all_reduce(total, group=get_data_parallel_group(), async_op=True)

    @cache
    def share() -> Weight:
        work.wait()
        return weight * ranks / torch.where(total > 0, total, 1)

    return share


def _exact(weight: float | Tensor) -> Weight:
    """Return a weight in double precision if the device has it, so that counts are not rounded to 24 bits."""
    return weight.detach().to(_float(weight.device)) if isinstance(weight, Tensor) else float(weight)


def _float(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
