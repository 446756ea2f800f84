"""Average gradients over ranks if DDP does not do it in the backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.distributed.ranks import get_data_parallel_group, get_data_parallel_size
from runner.distributed.sharding import local

BUCKET_BYTES = 1 << 25
"""Bytes of the gradients that one collective averages."""


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over the ranks, as DDP does in backward. All ranks, with the same gradients present.

    If some ranks see the same samples, each averages its part of the gradients with the ranks that hold the same part.
    Gradients travel in buckets, with one collective for each; while one is under way, the next is filled.
    """
    pending: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()
    for bucket in _buckets([local(parameter.grad) for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=get_data_parallel_group(), async_op=True)))
        if len(pending) > 1:
            _store_average(*pending.popleft())
    for item in pending:
        _store_average(*item)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of gradients of one type and device, in order, each of about `BUCKET_BYTES`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        bucket = kinds.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(tensor.nbytes for tensor in bucket) >= BUCKET_BYTES:
            yield kinds.pop((gradient.dtype, gradient.device))
    yield from kinds.values()


def _store_average(bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    parts = flat.div_(get_data_parallel_size()).split([gradient.numel() for gradient in bucket])
    averages = [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)]
    torch._foreach_copy_(bucket, averages)  # pyright: ignore[reportPrivateImportUsage]
