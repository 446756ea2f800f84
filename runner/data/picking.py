"""Pick batches from tensors. Small batches are copied several at a time: a launch costs more than such a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.data.order import SampleOrder

PICKED_BYTES = 1 << 17  # bytes of small batches that are copied together
ALIGNMENT = 64  # bytes, of torch's memory
ALIGNMENT_OF_ACCELERATORS = 512  # bytes; cuBLASLt chooses its algorithm by up to 256 of them


def pick_batches(tensors: Sequence[Tensor], order: SampleOrder, epoch: int, first: int) -> Iterator[Any]:
    """Yield this rank's batches of an epoch, starting at batch `first`.

    Args:
        tensors: at least one tensor; dimension 0 of each is the samples, the same number in all.
        order: says which samples make up each batch.
        epoch: at least 0.
        first: number of the first batch within the epoch.

    Yields:
        A tuple with the part of each tensor; the bare part if there is only one tensor.
    """
    permutation = order.permutation(epoch).to(tensors[0].device, non_blocking=True) if order.shuffle else None
    count = _count_picked_together(tensors, order)
    if permutation is None or count == 1:
        yield from _pick_each(tensors, order, permutation, first)
        return
    for number in range(first, len(order), count):
        spans = [order.span(batch) for batch in range(number, min(number + count, len(order)))]
        index = torch.cat([permutation[start:stop] for start, stop in spans])
        sizes = [stop - start for start, stop in spans]
        # These parts share memory, but autograd does not treat them as views: each may be changed in place by itself.
        parts = [torch.unsafe_split_with_sizes(tensor.index_select(0, index), sizes) for tensor in tensors]
        yield from zip(*parts, strict=True) if len(parts) > 1 else parts[0]


def _pick_each(tensors: Sequence[Tensor], order: SampleOrder, permutation: Tensor | None, first: int) -> Iterator[Any]:
    for number in range(first, len(order)):
        span = slice(*order.span(number))
        if permutation is None:
            parts = [tensor[span] for tensor in tensors]
        else:
            index = permutation[span]
            parts = [tensor.index_select(0, index) for tensor in tensors]
        yield tuple(parts) if len(parts) > 1 else parts[0]


def _count_picked_together(tensors: Sequence[Tensor], order: SampleOrder) -> int:
    # With gradients, each batch needs its own graph: the first backward pass would free a shared graph.
    if any(tensor.requires_grad or tensor.layout is not torch.strided for tensor in tensors):
        return 1
    start, stop = order.span(0)
    sizes = [(stop - start) * tensor[:1].nbytes for tensor in tensors]
    # Each part must be aligned like separate memory, because the last bits of some operations depend on it.
    if any(size % _alignment(tensor) for size, tensor in zip(sizes, tensors, strict=True)):
        return 1
    return max(1, PICKED_BYTES // max(1, sum(sizes)))


def _alignment(tensor: Tensor) -> int:
    # Integers have no last bits that could differ.
    exact = tensor.is_cpu or not (tensor.is_floating_point() or tensor.is_complex())
    return ALIGNMENT if exact else ALIGNMENT_OF_ACCELERATORS
