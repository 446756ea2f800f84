"""The rank of this process, the number of ranks, and the ranks that see the same samples."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from runner.distributed.store import TIMEOUT

_group_size = 1  # consecutive ranks that see the same samples
_data_group: dist.ProcessGroup | None = None  # one rank of each such group; None: all ranks


def get_global_rank() -> int:
    """Return this process's rank, from the process group or else the environment; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of ranks, from the process group or else the environment; 1 for a single process."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return this process's rank on its machine, which is also the index of its GPU; 0 for a single process."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_data_parallel_rank() -> int:
    """Return this rank's index among ranks with different samples; ranks with the same index see the same samples."""
    return get_global_rank() // _group_size


def get_data_parallel_size() -> int:
    """Return the number of ranks that see different samples: all, unless tensor parallelism is used."""
    return get_world_size() // _group_size


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return the group in which this rank reduces, with one rank for each share of the samples; None: all ranks."""
    return _data_group


def share_samples(ranks: int) -> None:
    """Set how many consecutive ranks see the same samples, a divisor of the world size; 1: no two do. All ranks."""
    global _group_size, _data_group
    _group_size = ranks
    _data_group = None
    if ranks > 1:
        size = get_world_size()
        groups: list[Any] = [dist.new_group([*range(first, size, ranks)], timeout=TIMEOUT) for first in range(ranks)]
        _data_group = groups[get_global_rank() % ranks]
