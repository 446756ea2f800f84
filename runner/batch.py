"""Operations on batches of any nesting: move, count, split. Tensors are sliced into views where possible, not copied.

Samples are either stacked along dimension 0 of tensors, or separate items of a list if their sizes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from runner.failures import UnsupportedType


def map_tensors(batch: Any, function: Callable[[Tensor], Any], lists: Callable[[Any], Any] | None = None) -> Any:
    """Return a batch of the same nesting with `function` applied to its tensors.

    Args:
        batch: a batch of any nesting.
        function: a function from a tensor to its replacement.
        lists: a function from a tuple or list to its replacement, or to None, in which case its items are mapped.
            Without such a function, the items of all tuples and lists are mapped.

    Raises:
        TypeError: the batch contains something other than tensors, tuples, lists, mappings and plain values.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, lists) for key, value in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, lists) for value in batch))
    if isinstance(batch, tuple | list):
        if lists is not None and (replaced := lists(batch)) is not None:
            return replaced
        return type(batch)(map_tensors(value, function, lists) for value in batch)
    if isinstance(batch, numpy.generic):
        return batch.item()  # numpy's float64 is also a float, but a checkpoint could only store it by pickling
    if batch is None or isinstance(batch, str | bytes | bool | int | float):
        return batch
    raise UnsupportedType(
        f"a batch holds a {type(batch).__name__}; it must be a tensor, or a tuple, list or mapping of tensors. "
        "Convert it in the data set or in the loader's collate_fn.",
        type(batch).__name__,
    )


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors(value)


def count_samples(batch: Any, strict: bool = False) -> int:
    """Return the number of samples: the size of dimension 0 of a batch's first tensor, or the length of its lists.

    Args:
        batch: a batch of any nesting. If each of its parts is a list of similar items, the items are the samples.
        strict: whether to refuse an ambiguous batch as well.

    Raises:
        TypeError: the batch contains no tensor with a dimension, or it is ambiguous what a sample is.
    """
    if not strict and (first := next((one for one in _columns(batch) if isinstance(one, Tensor)), None)) is not None:
        return first.shape[0]  # the fast path: this runs for every batch, and most batches hold tensors
    columns = [*_columns(batch)]
    stacked = [len(one) for one in columns if isinstance(one, Tensor)]
    lists = [one for one in columns if not isinstance(one, Tensor)]
    readings = [found for one in lists if (found := _readings(one))]
    if stacked:
        counts = {*stacked} if _are_alike(batch) else {stacked[0]}
        count = stacked[0]
    elif readings:
        counts = set.intersection(*readings)
        counts = counts & {len(one) for one in lists if not _readings(one)} or counts  # lists of texts or numbers
        count = min(counts) if len(counts) == 1 else len(lists[0])
    else:
        raise TypeError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a dimension. "
            "A batch is a tensor, or a tuple, list or mapping of tensors; otherwise override Model.num_samples."
        )
    if strict and len(counts) != 1:
        told = " or ".join(map(str, sorted(counts))) or "no number that all its parts agree on"
        raise TypeError(
            f"cannot tell what a sample is in a batch of type {type(batch).__name__}: it may hold {told}. "
            "Override Model.num_samples, which returns the number of samples in a batch."
        )
    return count


def _columns(batch: Any, inside: bool = False) -> Iterator[Any]:
    """Yield the parts of a batch whose length may be the number of samples: tensors, and lists of similar items.

    Zero-dimensional tensors are left out. If the batch itself is a tuple or list that starts with a tensor, its items
    are columns, as torch's default collation returns them.
    """
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _columns(value, True)
    elif isinstance(batch, tuple | list):
        is_collated = not inside and len(batch) > 0 and isinstance(batch[0], Tensor)
        if not is_collated and not hasattr(batch, "_fields") and _are_alike(batch):
            yield batch
        else:
            for value in batch:
                yield from _columns(value, True)


def _are_alike(batch: Any) -> bool:
    """Return whether a batch is a tuple or list of items of one kind."""
    return isinstance(batch, tuple | list) and len({_kind(one) for one in batch} - {_EMPTY}) == 1


_EMPTY: tuple[Any, ...] = ("list",)


def _kind(item: Any) -> Any:
    """Return a key that is equal for items of the same structure, whatever their sizes."""
    if isinstance(item, Tensor):
        return item.ndim, item.dtype
    if isinstance(item, Mapping):
        return frozenset(item)
    if isinstance(item, tuple | list):
        return *_EMPTY, *dict.fromkeys(_kind(one) for one in item)
    return "text" if isinstance(item, str | bytes) else type(item)


def _readings(items: Sequence[Any]) -> set[int]:
    """Return the possible numbers of samples in a list of similar items; empty if it contains no tensor."""
    sizes = {len(one) for one in tensors(items) if one.ndim}
    if not sizes and not any(True for _ in tensors(items)):
        return set()
    inner = {len(one) if _are_alike(one) else 0 for one in items} - {0}
    return {len(items)} | (sizes if len(sizes) == 1 else set()) | (inner if len(inner) == 1 else set())


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; pinned tensors are copied asynchronously."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, num_samples: int, parts: int | None = None, size: int | None = None) -> list[tuple[int, Any]]:
    """Return microbatches as pairs (index of the first sample, view of the batch); a single one is the batch itself.

    Args:
        batch: a batch of tensors whose dimension 0 is `num_samples`, and of lists of as many samples or texts.
            Zero-dimensional tensors and plain values go to every microbatch.
        num_samples: the number of samples in the batch.
        parts: the number of microbatches, fewer if there are fewer samples. Sizes differ by at most one.
        size: samples per microbatch, in place of `parts`; the last microbatch may be smaller.

    Raises:
        ValueError: a tensor of the batch has a different size in dimension 0.
    """
    if size is not None:
        bounds = [*range(0, num_samples, size), num_samples]
    else:
        parts = max(1, min(parts or 1, num_samples))
        bounds = [num_samples * index // parts for index in range(parts + 1)]
    if len(bounds) <= 2:
        return [(0, batch)]

    def part(start: int, end: int) -> Any:
        def cut(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0:
                return tensor
            if tensor.shape[0] != num_samples:
                raise ValueError(
                    f"cannot split a batch of {num_samples} samples: a tensor in it has shape {tuple(tensor.shape)}. "
                    "Dimension 0 of all must count samples; or use grad_accum=1."
                )
            return tensor[start:end]

        return map_samples(batch, num_samples, cut, lambda items: items[start:end])

    return [(start, part(start, end)) for start, end in pairwise(bounds)]


def map_samples(
    batch: Any, num_samples: int, function: Callable[[Tensor], Any], pick: Callable[[Sequence[Any]], Any]
) -> Any:
    """Return a batch of the same nesting with `function` applied to its tensors, and `pick` to its lists of samples.

    Args:
        batch: a batch of any nesting.
        num_samples: the number of samples in the batch.
        function: the function to apply to each tensor outside of these lists.
        pick: the function to apply to each tuple or list of `num_samples` samples, or of as many texts.
    """
    columns = [*_columns(batch)]
    lists = [one for one in columns if not isinstance(one, Tensor) and len(one) == num_samples]
    # If a list is as long as the tensors in it, only the rest of the batch tells whether its items are samples.
    apart = [one for one in lists if {len(tensor) for tensor in tensors(one) if tensor.ndim} != {num_samples}]
    is_stacked = any(isinstance(one, Tensor) for one in columns)
    chosen = {id(one) for one in (apart if is_stacked else lists if any(map(_readings, apart)) else apart)}
    return map_tensors(batch, function, lambda items: pick(items) if id(items) in chosen else None)
