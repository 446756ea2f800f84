"""The process group, this rank's device, replicas of a model, and collectives."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.ranks import (
    get_data_parallel_group,
    get_data_parallel_size,
    get_global_rank,
    get_local_rank,
    get_world_size,
    share_samples,
)
from runner.distributed.store import TIMEOUT, group_store
from runner.failures.errors import wrong_argument

T = TypeVar("T")


def init_process_group(device: torch.device) -> bool:
    """Make a process group with the other ranks, if there are any: gloo on the CPU, plus NCCL on CUDA. All ranks.

    A single process makes no group, and an existing group is kept. A GPU always becomes the current device, so that no
    rank allocates memory on another rank's GPU.

    Returns:
        True if a group was made; then call `destroy_process_group` at the end.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if get_world_size() == 1 or dist.is_initialized():
        return False
    rank = get_global_rank()
    size = get_world_size()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Other ranks may wait while rank 0 writes a large checkpoint, longer than NCCL's default timeout of ten minutes.
    dist.init_process_group(backend, store=group_store(), rank=rank, world_size=size, timeout=TIMEOUT)
    return True


def destroy_process_group(error: BaseException | None = None) -> None:
    """Free what is left of DDP, whose threads must not outlive the process group, and destroy the group.

    Args:
        error: the error that ends the run. If the device failed, the group is not destroyed, because NCCL would wait
            for the device.
    """
    gc.collect()
    share_samples(1)
    if dist.is_initialized() and not isinstance(error, torch.AcceleratorError):
        dist.destroy_process_group()


def pick_device(device: str | torch.device) -> torch.device:
    """Return the named device; 'auto' is this rank's GPU if there is one, else Apple's GPU, else the CPU."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise wrong_argument("device", device, "must be 'auto', 'cpu', 'mps', 'cuda' or 'cuda:0' and so on") from None
    if picked.type == "cuda":
        count = torch.cuda.device_count()
        index = get_local_rank() if picked.index is None else picked.index
        if index >= count:
            reason = f"this rank would use GPU {index}, but torch finds {count or 'none'} here"
            raise wrong_argument("device", str(device), f"{reason}; give auto or cpu, or start fewer ranks")
        return torch.device("cuda", index)
    try:
        torch.empty(0, device=picked)
    except (RuntimeError, AssertionError, ImportError):  # depends on the backend
        raise wrong_argument("device", str(device), "torch finds none here; give auto or cpu") from None
    return picked


def replicate(model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> nn.Module:
    """Return the model wrapped for data-parallel training, or the model itself in a single process.

    Buffers are not broadcast in each forward pass: `broadcast_buffers` copies those of rank 0 to all ranks before they
    are read. `options` are further arguments of `DistributedDataParallel`.
    """
    if get_world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    ids = [device.index] if device.type == "cuda" else None
    is_renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # since torch 2.13
    options = {**options, "forward_sync_buffers" if is_renamed else "broadcast_buffers": False}
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers, such as the running statistics of batch norm, to all ranks. All ranks."""
    if get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def broadcast_object(value: T) -> T:
    """Return rank 0's value on all ranks, sent as JSON, so that nothing is unpickled. All ranks."""
    if get_world_size() == 1:
        return value
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(content.numel())
    dist.broadcast(size, src=0)
    content = content if get_global_rank() == 0 else content.new_empty(int(size))
    dist.broadcast(content, src=0)
    return json.loads(content.numpy().tobytes())


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks that see different samples, in place, and return it. All ranks."""
    if get_data_parallel_size() > 1:
        dist.all_reduce(tensor, group=get_data_parallel_group())
    return tensor


def any_rank(condition: bool) -> bool:
    """Return whether a condition holds on at least one rank. All ranks, on the host, without waiting for a device."""
    return bool(max_over_ranks(int(condition)))


def max_over_ranks(number: int) -> int:
    """Return the largest of the ranks' numbers. All ranks, on the host, without waiting for a device."""
    if get_world_size() == 1:
        return number
    maximum = torch.tensor(number)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)
