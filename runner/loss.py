"""Losses: what is minimized, and how much each microbatch and each rank counts.

The gradient of a batch is the mean over all that its loss averages over (samples; target tokens, say, where a model
overrides `loss_weight`), however it is cut into microbatches and spread over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.distributed.collectives import all_reduce_sum
from runner.model import Model

Weight = float | Tensor


def check_loss(loss: Any, source: str, trains: bool) -> None:
    """Raise where a loss cannot be logged and averaged, or not be trained.

    Args:
        loss: what a model returned.
        source: what returned it, for the message: `MyModel.loss`.
        trains: whether its gradient is wanted.

    Raises:
        TypeError: it is neither a zero-dimensional tensor nor a dict of them.
        ValueError: it has no gradient.
    """
    named = {repr(name): part for name, part in loss.items()} if isinstance(loss, dict) else {}
    for name, part in (named or {"a loss": loss}).items():
        if not isinstance(part, Tensor) or part.ndim:
            kind = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"type {type(part).__name__}"
            allowed = "a tensor of no dimensions, such as losses.mean(), or a dict of such tensors"
            raise TypeError(f"{source} returned {name} of {kind}: it must be {allowed}")
    if trains and not total_of(loss).requires_grad:
        remedy = "without no_grad(), detach(), item() or argmax(), and leave parameters that require a gradient"
        raise ValueError(f"{source} returned a loss without a gradient: compute it from the outputs {remedy}")


def total_of(loss: Tensor | dict[str, Tensor]) -> Tensor:
    """Return what is minimized: the loss itself, or of several the one named 'total', or else their sum."""
    if isinstance(loss, Tensor):
        return loss
    return loss["total"] if "total" in loss else sum(loss.values())  # type: ignore[return-value]


def scaled_total(loss: Tensor | dict[str, Tensor], scale: Weight) -> Tensor:
    """Return what is minimized, times a scale."""
    total = total_of(loss)
    if isinstance(scale, Tensor):
        return total * scale.to(total.dtype)
    return total if scale == 1.0 else total * scale


def weighted_sum(
    losses: Sequence[tuple[Tensor, dict[str, Tensor]]], weights: Sequence[Weight]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum of losses as `detach` gave them, total and parts."""
    pairs = list(zip(losses, weights, strict=True))
    total = torch.stack([total * weight for (total, _), weight in pairs]).sum()
    parts = {name: torch.stack([part[name] * weight for (_, part), weight in pairs]).sum() for name in losses[0][1]}
    return total, parts


def detach(loss: Tensor | dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the total of a loss and its parts by name, without their graph."""
    if isinstance(loss, Tensor):
        return loss.detach(), {}
    return total_of(loss).detach(), {name: value.detach() for name, value in loss.items() if name != "total"}


def fractions(model: Model, microbatches: Sequence[Any]) -> list[Weight]:
    """Return the part of this rank's batch that each microbatch makes up; they add up to 1."""
    weights = [_exact(model.loss_weight(microbatch)) for microbatch in microbatches]
    total = sum(weights)
    total = torch.where(total > 0, total, 1) if isinstance(total, Tensor) else total or 1.0
    return [weight / total for weight in weights]


def rank_share(model: Model, batch: Any, samples: int, all_samples: int, world_size: int) -> Weight:
    """Return the part of all ranks' batch that this rank's makes up, times the number of ranks.

    DDP averages gradients over ranks, so 1 is right where all ranks have equally much. Samples are counted by the
    sampler; what else a loss averages over only the ranks know, and one number is summed over them, on the device.

    Args:
        model: whose loss it is.
        batch: this rank's.
        samples: on this rank; 0 where the batch only stands in for an empty share.
        all_samples: on all ranks.
        world_size: number of ranks.
    """
    if world_size == 1:
        return 1.0
    if type(model).loss_weight is Model.loss_weight:
        return samples * world_size / all_samples
    mine = _exact(model.loss_weight(batch)) if samples else 0.0
    device = next(model.parameters()).device
    mine = mine if isinstance(mine, Tensor) else torch.full((), mine, dtype=_float(device), device=device)
    everyones = all_reduce_sum(mine.clone())
    return mine * world_size / torch.where(everyones > 0, everyones, 1)


def _exact(weight: float | Tensor) -> Weight:
    """Return a weight in a type that holds counts and their ratios without rounding to 24 bits."""
    return weight.detach().to(_float(weight.device)) if isinstance(weight, Tensor) else float(weight)


def _float(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
