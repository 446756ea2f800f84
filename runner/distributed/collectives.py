"""The ranks: which one this process is, how a model is replicated, and collectives on the host."""

from __future__ import annotations

import gc
import inspect
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.distributed.store import TIMEOUT, group_store

T = TypeVar("T")


def get_global_rank() -> int:
    """Return this process's rank among all, from the process group or else the environment; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of ranks, from the process group or else the environment; 1 for a single process."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return this process's rank on its machine, which is also the index of its GPU; 0 for a single process."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_process_group(device: torch.device) -> bool:
    """Make a process group with the other ranks, if there are any: gloo on the CPU, plus NCCL on CUDA. All ranks.

    A single process makes no group, and an existing group is used as it is. A GPU becomes the current device in any
    case, so that no rank allocates memory on another rank's GPU.

    Returns:
        Whether a group was made; if so, `destroy_process_group` has to end it.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if get_world_size() == 1 or dist.is_initialized():
        return False
    rank = get_global_rank()
    size = get_world_size()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # The others may wait while rank 0 writes a large checkpoint, and NCCL's own timeout is ten minutes.
    dist.init_process_group(backend, store=group_store(), rank=rank, world_size=size, timeout=TIMEOUT)
    return True


def destroy_process_group(error: BaseException | None = None) -> None:
    """Destroy the process group, after DDP's leftovers are collected, because its threads must not outlive the group.

    Args:
        error: the error that ends the run. After a failure of the device the group is left alone: NCCL would wait for
            the device while destroying it.
    """
    gc.collect()
    if dist.is_initialized() and not isinstance(error, torch.AcceleratorError):
        dist.destroy_process_group()


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device for a name; 'auto' means this rank's GPU if there is one, else Apple's, else the CPU.

    Raises:
        ValueError: the name is not that of a device, or this machine has no such device.
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
            wants = f"this rank would use GPU {index}, but torch finds {count or 'none'} here"
            raise ValueError(f"device={str(device)!r}: {wants}; give auto or cpu, or start fewer ranks")
        return torch.device("cuda", index)
    return picked


def replicate(model: nn.Module, device: torch.device, options: Mapping[str, Any]) -> nn.Module:
    """Return the model wrapped for data-parallel training, or the model itself in a single process.

    Buffers are not broadcast in each forward pass; `broadcast_buffers` copies rank 0's to all ranks before they are
    read.

    Args:
        model: the model, on its device.
        device: this rank's device.
        options: further arguments for `DistributedDataParallel`.
    """
    if get_world_size() == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    ids = [device.index] if device.type == "cuda" else None
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # since torch 2.13
    options = {**options, "forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)


def broadcast_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers, such as the running statistics of batch norm, to all ranks. All ranks."""
    if get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def broadcast_object(value: T) -> T:
    """Return rank 0's value on all ranks. All ranks; the value travels as JSON, so nothing is unpickled."""
    if get_world_size() == 1:
        return value
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor(content.numel())
    dist.broadcast(size, src=0)
    content = content if get_global_rank() == 0 else content.new_empty(int(size))
    dist.broadcast(content, src=0)
    return json.loads(content.numpy().tobytes())


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it. All ranks."""
    if get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


BUCKET_BYTES = 1 << 25
"""Of gradients that are averaged in one collective."""


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over all ranks, as DDP does in backward. All ranks must have the same gradients present.

    They travel in buckets, one collective each; while one is on its way, the next is filled.
    """
    started: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        if len(started) > 1:
            _take_average(*started.popleft())
    for last in started:
        _take_average(*last)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one type and device in lists, in order, each of about `BUCKET_BYTES`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        bucket = kinds.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(one.nbytes for one in bucket) >= BUCKET_BYTES:
            yield kinds.pop((gradient.dtype, gradient.device))
    yield from kinds.values()


def _take_average(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    parts = flat.div_(get_world_size()).split([gradient.numel() for gradient in bucket])
    averages = [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)]
    torch._foreach_copy_(bucket, averages)  # pyright: ignore[reportPrivateImportUsage]


def any_rank(condition: bool) -> bool:
    """Return whether a condition holds on at least one rank. All ranks, on the host: waits for no device."""
    return all_reduce_sum(torch.tensor(int(condition))).item() > 0
