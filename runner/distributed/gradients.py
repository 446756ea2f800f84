"""Averages gradients over ranks if DDP does not do so during the backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runner.distributed.ranks import get_data_parallel_group, get_data_parallel_size
from runner.distributed.sharding import local

BUCKET_BYTES = 1 << 25
"""Of gradients that are averaged in one collective."""


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over the ranks, as DDP does in backward. All ranks must have the same gradients present.

    Where ranks see the same samples, each averages its part of the gradients with those ranks that have the same part.
    Gradients travel in buckets, one collective each; while one is on its way, the next is filled.
    """
    started: deque[tuple[list[Tensor], Tensor, dist.Work | None]] = deque()
    for bucket in _buckets([local(parameter.grad) for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        started.append((bucket, flat, dist.all_reduce(flat, group=get_data_parallel_group(), async_op=True)))
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
    parts = flat.div_(get_data_parallel_size()).split([gradient.numel() for gradient in bucket])
    averages = [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)]
    torch._foreach_copy_(bucket, averages)  # pyright: ignore[reportPrivateImportUsage]
