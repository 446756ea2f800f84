"""Accelerator memory."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def grow_segments() -> None:
    """Let torch's GPU allocator expand its segments, unless the environment sets options. Call before importing torch.

    In fixed-size segments, batches of varying shapes leave gaps, and memory runs out although much of it is free.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in SETTINGS):
        os.environ[SETTINGS[0]] = "expandable_segments:True"


def free_bytes(device: torch.device) -> int | None:
    """Return the number of free bytes on a GPU; None for other devices, which do not report it."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def bytes_in_use(device: torch.device) -> int:
    """Return the bytes that tensors of this process take on a GPU, without a sync; 0 on other devices."""
    import torch

    if device.type != "cuda":
        return 0
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


def collect_garbage(device: torch.device) -> None:
    """Free the GPU memory of earlier Trainers in this process, kept alive by reference cycles.

    Otherwise the second job of a sweep would hold the first's weights and data as well as its own.
    """
    import torch

    if device.type == "cuda" and torch.cuda.memory_allocated(device):
        gc.collect()
