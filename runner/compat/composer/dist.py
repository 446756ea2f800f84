"""The functions of `composer.utils.dist`, except those that need pickling between ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from runner.compat.composer import absent
from runner.distributed.ranks import get_global_rank, get_local_rank, get_world_size

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_size",
    "is_available",
    "is_initialized",
]


def get_local_world_size() -> int:
    """Return the number of ranks on this machine; 1 for a single process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_node_rank() -> int:
    """Return this machine's rank among all machines, from torchrun or Slurm; 0 for a single machine."""
    return int(os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")))


def is_available() -> bool:
    """Return whether torch was built with support for several ranks."""
    return distributed.is_available()


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
    """Return the tensors of all ranks, which must have equal shapes. All ranks."""
    if not is_initialized():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size())]
    distributed.all_gather(gathered, tensor)
    return gathered


def __getattr__(name: str) -> Any:
    raise absent.missing("dist", name, absent.DIST)
