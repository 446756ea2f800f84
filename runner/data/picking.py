"""Pick batches from tensors, several small ones per copy: launching the kernel costs more than the copy itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.data.order import SampleOrder

PICKED_BYTES = 1 << 17  # bytes of small batches to copy together
ALIGNMENT = 64  # bytes, of torch's CPU allocations
ALIGNMENT_OF_ACCELERATORS = 512  # bytes; cuBLASLt's choice of algorithm depends on alignment up to 256


def pick_batches(tensors: Sequence[Tensor], order: SampleOrder, epoch: int, first: int) -> Iterator[Any]:
    """Yield this rank's batches of an epoch, starting at batch `first`.

    Args:
        tensors: at least one tensor; samples along dimension 0, the same number in each.
        order: says which samples make up each batch.
        epoch: at least 0.
        first: number of the first batch within the epoch.

    Yields:
        A tuple with a slice of each tensor, or just the slice if there is only one tensor.
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
        # The parts share memory, but autograd does not treat them as views, so each can be changed in place.
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
    # Each part must be aligned like a separate allocation: the last bits of some results depend on it.
    if any(size % _alignment(tensor) for size, tensor in zip(sizes, tensors, strict=True)):
        return 1
    return max(1, PICKED_BYTES // max(1, sum(sizes)))


def _alignment(tensor: Tensor) -> int:
    # Integer results do not depend on alignment.
    is_cpu_or_integer = tensor.is_cpu or not (tensor.is_floating_point() or tensor.is_complex())
    return ALIGNMENT if is_cpu_or_integer else ALIGNMENT_OF_ACCELERATORS
