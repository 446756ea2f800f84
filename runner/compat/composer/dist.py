"""The functions of `composer.utils.dist`, except those that need pickling between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from runner.distributed.ranks import get_global_rank, get_local_rank, get_world_size

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "get_global_rank", "get_local_rank", "get_world_size"]


def is_initialized() -> bool:
    """Return whether this process is one of several ranks."""
    return get_world_size() > 1


def barrier() -> None:
    """Wait for all ranks."""
    if is_initialized():
        distributed.barrier()


def all_reduce(tensor: Tensor, reduce_operation: str = "SUM") -> None:
    """Reduce a tensor over all ranks, in place; `reduce_operation` is SUM, PRODUCT, MIN or MAX. All ranks."""
    if is_initialized():
        distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, reduce_operation.upper()))


def broadcast(tensor: Tensor, src: int) -> None:
    """Copy the tensor of the rank `src` to all ranks, in place. All ranks."""
    if is_initialized():
        distributed.broadcast(tensor, src=src)


def all_gather(tensor: Tensor) -> Sequence[Tensor]:
    """Return the tensor of each rank, which must all have one shape. All ranks."""
    if not is_initialized():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size())]
    distributed.all_gather(gathered, tensor)
    return gathered


def __getattr__(name: str) -> Any:
    if name in ("all_gather_object", "broadcast_object_list"):
        raise AttributeError(f"dist.{name} would unpickle data from another rank: gather or broadcast tensors instead")
    raise AttributeError(f"dist.{name} has no counterpart here; dist has {', '.join(__all__)}, is_initialized")
