"""Copy large tensors into their batch as they are read, instead of keeping all samples until they are stacked.

A sample just read is still in the CPU's cache, and the next sample can use its memory. The batch equals the one that
torch's `default_collate` makes. This needs private functions of torch: if one is missing, samples are stacked as usual.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

_collate: Any = None
_collate_tensors: Any = None
_functions: dict[Any, Any] = {}
try:
    from torch.utils.data._utils.collate import collate as _collate
    from torch.utils.data._utils.collate import collate_tensor_fn as _collate_tensors
    from torch.utils.data._utils.collate import default_collate_fn_map as _functions
except ImportError:
    pass

LARGE = 64 * 1024  # bytes from which a tensor is copied into the batch; smaller ones are faster to stack together

_NUMBERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
_NUMBERS |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class GrowingBatch:
    """A batch for `default_collate` whose large tensors are copied into it sample by sample.

    Only plain tensors are copied: dense, contiguous, on the CPU, without gradient; they may be in tuples, lists and
    dicts. If samples differ in shape or type, torch stacks or refuses them at the end.

    Args:
        size: number of samples.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0  # of the next sample
        self._batches: list[tuple[Tensor, Sequence[Tensor]]] = []  # (batch, its rows) for each large tensor of a sample
        self._next = 0  # index in `_batches` of the next large tensor
        # Not if a user has registered another function for tensors.
        self._copies = _collate is not None and _functions.get(Tensor) is _collate_tensors

    def keep(self, sample: Any) -> Any:
        """Return the sample with its large tensors replaced by equal rows of the batch."""
        if not self._copies:
            return sample
        self._next = 0
        kept = self._copy_large(sample)
        self._number += 1
        return kept

    def collate(self, kept: list[Any]) -> Any:
        """Return the batch that `default_collate` makes of all samples that `keep` returned, in their order."""
        if not self._batches:
            return default_collate(kept)
        return _collate(kept, collate_fn_map={**_functions, Tensor: self._stack})

    def _copy_large(self, value: Any) -> Any:
        kind = type(value)
        if kind is Tensor:
            return self._copy_row(value) if is_plain(value) and value.nbytes >= LARGE else value
        if kind is tuple or kind is list:
            return kind([self._copy_large(part) for part in value])
        if kind is dict:
            return {key: self._copy_large(part) for key, part in value.items()}
        return value

    def _copy_row(self, value: Tensor) -> Tensor:
        if self._number == 0:
            batch = _allocate(self._size, value)
            self._batches.append((batch, batch.unbind()))
        elif self._next == len(self._batches):
            return value
        row = self._batches[self._next][1][self._number]
        self._next += 1
        if row.shape != value.shape or row.dtype != value.dtype:
            return value
        return row.copy_(value)

    def _stack(self, tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
        for batch, rows in self._batches:
            if len(tensors) == len(rows) and all(map(operator.is_, tensors, rows)):
                return batch
        return _collate_tensors(tensors, collate_fn_map=collate_fn_map)


def is_plain(value: Tensor) -> bool:
    """Return whether a tensor, or an instance of a subclass, is dense, contiguous, on the CPU and without gradient."""
    return (
        value.layout is torch.strided
        and value.dtype in _NUMBERS
        and not value.is_nested
        and value.is_cpu
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_neg()
    )


def _allocate(size: int, like: Tensor) -> Tensor:
    shape = (size, *like.shape)
    if get_worker_info() is None:
        return like.new_empty(shape)
    # In shared memory the batch is not copied again when it is sent.
    make_shared = getattr(torch.UntypedStorage, "_new_shared", None)
    if make_shared is None:
        return like.new_empty(shape).share_memory_()
    return like.new_empty(0).set_(make_shared(size * like.nbytes)).resize_(shape)
