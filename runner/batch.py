"""What can be done with a batch, whatever its nesting: move, count, split. Nothing is copied where a view will do.

Samples are stacked, along dimension 0 of tensors, or each stands alone in a list, as those of different sizes do.
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
        batch: any nesting.
        function: is given each tensor.
        lists: is given each tuple and list, and returns what replaces it; None: what is in it is mapped.

    Raises:
        TypeError: something in it is neither a tensor, tuple, list nor mapping, nor a plain value.
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
        return batch.item()  # numpy's float64 is a float too, but could be read from a checkpoint by unpickling only
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
        batch: any nesting. Where each of its parts is a list of alike things, those are the samples.
        strict: whether a batch that can be read in two ways is refused, too.

    Raises:
        TypeError: there is no tensor with a dimension, or it cannot be told what a sample is.
    """
    if not strict and (first := next((one for one in _columns(batch) if isinstance(one, Tensor)), None)) is not None:
        return first.shape[0]  # asked of each batch, most of which are tensors
    columns = [*_columns(batch)]
    stacked = [len(one) for one in columns if isinstance(one, Tensor)]
    lists = [one for one in columns if not isinstance(one, Tensor)]
    readings = [found for one in lists if (found := _readings(one))]
    if stacked:
        counts = {*stacked} if _are_alike(batch) else {stacked[0]}
        count = stacked[0]
    elif readings:
        counts = set.intersection(*readings)
        counts = counts & {len(one) for one in lists if not _readings(one)} or counts  # names or numbers of samples
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
    """Yield the parts of a batch that may count samples: tensors with a dimension, and lists of alike things.

    Tensors right in a tuple or list that is itself the batch are its columns, as torch's own collation makes them.
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
    """Whether a batch is a tuple or list of things of one kind."""
    return isinstance(batch, tuple | list) and len({_kind(one) for one in batch} - {_EMPTY}) == 1


_EMPTY: tuple[Any, ...] = ("list",)


def _kind(item: Any) -> Any:
    """Return what two samples have in common, whatever their sizes."""
    if isinstance(item, Tensor):
        return item.ndim, item.dtype
    if isinstance(item, Mapping):
        return frozenset(item)
    if isinstance(item, tuple | list):
        return *_EMPTY, *dict.fromkeys(_kind(one) for one in item)
    return "text" if isinstance(item, str | bytes) else type(item)


def _readings(items: Sequence[Any]) -> set[int]:
    """Return how many samples a list of alike things may hold; nothing where there is no tensor in it."""
    sizes = {len(one) for one in tensors(items) if one.ndim}
    if not sizes and not any(True for _ in tensors(items)):
        return set()
    inner = {len(one) if _are_alike(one) else 0 for one in items} - {0}
    return {len(items)} | (sizes if len(sizes) == 1 else set()) | (inner if len(inner) == 1 else set())


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; pinned tensors are copied without waiting."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, num_samples: int, parts: int | None = None, size: int | None = None) -> list[tuple[int, Any]]:
    """Return microbatches as (index of the first sample, views of the batch), the whole batch itself if it is one.

    Args:
        batch: tensors whose dimension 0 is `num_samples`, and lists of as many samples or texts; zero-dimensional
            tensors and plain values go to every part.
        num_samples: samples in the batch.
        parts: number of microbatches; sizes differ by at most one, and there are no empty ones.
        size: samples per microbatch, in place of `parts`; the last may be smaller.
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
        batch: any nesting.
        num_samples: samples in it.
        function: is given each tensor that is in none of the lists.
        pick: is given each tuple or list of `num_samples` samples, or of as many texts.
    """
    columns = [*_columns(batch)]
    lists = [one for one in columns if not isinstance(one, Tensor) and len(one) == num_samples]
    # Where a list is as long as its tensors are, the rest of the batch tells which of the two counts.
    apart = [one for one in lists if {len(tensor) for tensor in tensors(one) if tensor.ndim} != {num_samples}]
    is_stacked = any(isinstance(one, Tensor) for one in columns)
    chosen = {id(one) for one in (apart if is_stacked else lists if any(map(_readings, apart)) else apart)}
    return map_tensors(batch, function, lambda items: pick(items) if id(items) in chosen else None)
