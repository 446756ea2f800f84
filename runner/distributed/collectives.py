"""Ranks: who this process is, how a model is replicated, and what all ranks must agree on."""

from __future__ import annotations

import gc
import inspect
import json
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.store import TIMEOUT, group_store

T = TypeVar("T")


def get_global_rank() -> int:
    """Return this process's rank among all, from the process group or else from the environment; 0 when alone."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of ranks, from the process group or else from the environment; 1 when alone."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return this process's rank on its machine, which is also the index of its GPU; 0 when alone."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_process_group(device: torch.device) -> bool:
    """Join the other ranks where there are any: gloo on the CPU, NCCL beside it on CUDA. All ranks.

    One process alone makes no process group, and one that exists already is used. In any case a GPU becomes the current
    one, so that no rank takes memory on another's.

    Returns:
        Whether a group was made, which `destroy_process_group` then has to end.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if get_world_size() == 1 or dist.is_initialized():
        return False
    rank = get_global_rank()
    size = get_world_size()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Others may wait for rank 0 while it writes a large checkpoint: NCCL alone would give it ten minutes.
    dist.init_process_group(backend, store=group_store(), rank=rank, world_size=size, timeout=TIMEOUT)
    return True


def destroy_process_group(error: BaseException | None = None) -> None:
    """Leave the other ranks. What DDP left behind goes first: its threads must not outlive the group.

    Args:
        error: that the run ends with. Where the device has failed, nothing waits for it as NCCL would.
    """
    gc.collect()
    if dist.is_initialized() and not isinstance(error, torch.AcceleratorError):
        dist.destroy_process_group()


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device that a name asks for; 'auto': this rank's GPU, else Apple's, else the CPU.

    Raises:
        ValueError: the name is no device, or there is none of that kind here.
    """
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}: must be 'auto', 'cpu', 'mps', 'cuda' or 'cuda:0' and so on") from None
    if picked.type == "cuda":
        count = torch.cuda.device_count()
        index = get_local_rank() if picked.index is None else picked.index
        if index >= count:
            wants = f"this rank would use GPU {index}, but {count} are here"
            raise ValueError(f"device={str(device)!r}: {wants}; start fewer ranks, or give 'cpu'")
        return torch.device("cuda", index)
    return picked


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model wrapped for data-parallel training, or itself when this process is alone.

    Buffers are not broadcast in each forward pass; `broadcast_buffers` gives rank 0's to all, where they are read.
    """
    if get_world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    ids = [device.index] if device.type == "cuda" else None
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # since torch 2.13
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)


def broadcast_buffers(model: nn.Module) -> None:
    """Give all ranks rank 0's buffers (running statistics of batch norm). All ranks."""
    if get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def broadcast_object(value: T) -> T:
    """Return rank 0's value, one that JSON holds, on all ranks. All ranks; nothing is unpickled."""
    if get_world_size() == 1:
        return value
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(content.numel())
    dist.broadcast(size, src=0)
    content = content if get_global_rank() == 0 else content.new_empty(int(size))
    dist.broadcast(content, src=0)
    return json.loads(content.numpy().tobytes())


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Return a tensor summed over all ranks, in place. All ranks."""
    if get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over all ranks, as DDP does within backward. All ranks, with the same gradients present."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        if work is not None:
            work.wait()
    if gradients:
        torch._foreach_div_(gradients, get_world_size())  # pyright: ignore[reportPrivateImportUsage]


def any_rank(condition: bool) -> bool:
    """Return whether a condition holds on at least one rank. All ranks; the hosts agree, no device is waited for."""
    return all_reduce_sum(torch.tensor(int(condition))).item() > 0
