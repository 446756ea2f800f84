"""Operations on batches of any nesting: move, count, split. Tensors are sliced into views where possible, not copied.

Samples are either stacked along dimension 0 of tensors, or separate items of a list if their sizes differ. Any other
object may be a batch, or a part of one, if it has a method `to(device)` that returns it on a device, such as a batch of
graphs. Its `len()` is its number of samples, and `batch[start:end]` some of them; a model may say otherwise, see
`Model.num_samples` and `Model.slice_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from runner.failures.errors import UnsupportedType


def map_tensors(
    batch: Any,
    function: Callable[[Tensor], Any],
    lists: Callable[[Any], Any] | None = None,
    objects: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a batch of the same nesting with `function` applied to its tensors.

    Args:
        batch: a batch of any nesting.
        function: a function from a tensor to its replacement.
        lists: a function from a tuple or list to its replacement, or to None, in which case its items are mapped.
            Without such a function, the items of all tuples and lists are mapped.
        objects: a function from an object with a method `to` to its replacement, or to None, in which case it is mapped
            if it is a mapping, a tuple or a list. Without such a function, that is so for all objects.

    Raises:
        TypeError: the batch contains something other than tensors, tuples, lists, mappings and plain values, for which
            `objects` has no replacement.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if objects is not None and _is_movable(batch) and (replaced := objects(batch)) is not None:
        return replaced
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, lists, objects) for value in batch))
    if isinstance(batch, tuple | list):
        if lists is not None and (replaced := lists(batch)) is not None:
            return replaced
        return type(batch)(map_tensors(value, function, lists, objects) for value in batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, lists, objects) for key, value in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, numpy.generic):
        return batch.item()  # numpy's float64 is also a float, but a checkpoint could only store it by pickling
    if batch is None or isinstance(batch, str | bytes | bool | int | float):
        return batch
    raise UnsupportedType(_refusal(batch), type(batch).__name__)


def _is_movable(batch: Any) -> bool:
    return callable(getattr(batch, "to", None))  # a mapping may have its keys as attributes, one of them `to`


def _refusal(batch: Any) -> str:
    """Return why a part of a batch cannot be handled, and what to do."""
    kind = type(batch).__name__
    allowed = "a tensor, or a tuple, list or mapping of tensors"
    if _is_movable(batch):
        why = "precision='bf16' and some algorithms have to change the tensors of a batch, and cannot look into it"
        return f"a batch holds a {kind}: {why}; give it {allowed} instead, or leave out what changes them"
    return (
        f"a batch holds a {kind}; it must be {allowed}, or have a method to(device). "
        "Convert it in the data set or in the loader's collate_fn."
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
    """Return the number of samples: the size of dimension 0 of a batch's first tensor, or the length of what it holds.

    Args:
        batch: a batch of any nesting. If each of its parts is a list of similar items, the items are the samples; those
            of a `PackedSequence` are its sequences.
        strict: whether to refuse an ambiguous batch as well.

    Raises:
        TypeError: the batch contains no tensor with a dimension and no object with a length, or it is ambiguous what a
            sample is.
    """
    if not strict:  # the fast path: this runs for every batch, and most batches start with a tensor
        first = batch[0] if type(batch) in (tuple, list) and batch else batch
        if not isinstance(first, Tensor) or not first.ndim:
            first = next((one for one in _columns(batch) if isinstance(one, Tensor)), None)
        if first is not None:
            return first.size(0)
    columns = [*_columns(batch)]
    stacked = [_length(one) for one in columns if not isinstance(one, tuple | list)]
    lists = [one for one in columns if isinstance(one, tuple | list)]
    readings = [found for one in lists if (found := _readings(one))]
    if stacked:
        agree = _are_alike(batch) or any(not isinstance(one, Tensor | tuple | list) for one in columns)
        counts = {*stacked} if agree else {stacked[0]}
        count = stacked[0]
    elif readings:
        counts = set.intersection(*readings)
        counts = counts & {len(one) for one in lists if not _readings(one)} or counts  # lists of texts or numbers
        count = min(counts) if len(counts) == 1 else len(lists[0])
    else:
        raise TypeError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a dimension. "
            "A batch is a tensor, or a tuple, list or mapping of tensors, or an object with to(device) and len(); "
            "otherwise override Model.num_samples."
        )
    if strict and len(counts) != 1:
        told = " or ".join(map(str, sorted(counts))) or "no number that all its parts agree on"
        raise TypeError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it may hold {told}. "
            "Override Model.num_samples, which returns the number of samples in a batch."
        )
    return count


def _columns(batch: Any, inside: bool = False) -> Iterator[Any]:
    """Yield the parts of a batch whose length may be the number of samples: tensors, objects, lists of similar items.

    Zero-dimensional tensors are left out. If the batch itself is a tuple or list that starts with a tensor, its items
    are columns, as torch's default collation returns them.
    """
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _columns(value, True)
    elif type(batch) is not tuple and isinstance(batch, PackedSequence):
        yield batch.data[: int(batch.batch_sizes[0])]  # the first item of each sequence; the sizes are on the CPU
    elif isinstance(batch, tuple | list):
        is_collated = not inside and len(batch) > 0 and isinstance(batch[0], Tensor)
        if not is_collated and not hasattr(batch, "_fields") and _are_alike(batch):
            yield batch
        else:
            for value in batch:
                yield from _columns(value, True)
    elif _is_sized_object(batch):
        yield batch


def _is_sized_object(batch: Any) -> bool:
    """Return whether something can be moved to a device and has a length, but is not a container of tensors."""
    is_container = isinstance(batch, Tensor | Mapping | tuple | list)
    return not is_container and _is_movable(batch) and hasattr(batch, "__len__")


def _length(column: Any) -> int:
    return column.size(0) if isinstance(column, Tensor) else len(column)  # a nested tensor of torch has no len()


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
    """Return the possible numbers of samples in a list of similar items; empty if these have no sizes."""
    sized = [one for one in items if _is_sized_object(one)] or [one for one in tensors(items) if one.ndim]
    sizes = {_length(one) for one in sized}
    if not sizes and not any(True for _ in tensors(items)):
        return set()
    inner = {len(one) if _are_alike(one) else 0 for one in items} - {0}
    return {len(items)} | (sizes if len(sizes) == 1 else set()) | (inner if len(inner) == 1 else set())


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; pinned tensors are copied asynchronously, objects by their own method `to`."""
    kind = type(batch)
    if kind in (tuple, list) and not [one for one in batch if type(one) is not Tensor or one.device != device]:
        return kind(batch)  # the fast path: tensors that are there already need no look into what they nest in

    def move(one: Any) -> Any:
        moved = one.to(device)
        return one if moved is None else moved  # it may have moved itself

    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True), objects=move)


Cut = Callable[[Any, int, int], Any]
"""Returns some samples of a batch, given the first and one past the last."""


def split(
    batch: Any, num_samples: int, cut: Cut | None = None, parts: int | None = None, size: int | None = None
) -> list[tuple[int, Any]]:
    """Return microbatches as pairs (index of the first sample, part of the batch); a single one is the batch itself.

    Args:
        batch: a batch of any kind.
        num_samples: the number of samples in the batch.
        cut: takes the samples of a microbatch out of the batch, `Model.slice_batch`; None: `slice_samples`.
        parts: the number of microbatches, fewer if there are fewer samples. Sizes differ by at most one.
        size: samples per microbatch, instead of `parts`; the last microbatch may be smaller.
    """
    if size is not None:
        bounds = [*range(0, num_samples, size), num_samples]
    else:
        parts = max(1, min(parts or 1, num_samples))
        bounds = [num_samples * index // parts for index in range(parts + 1)]
    if len(bounds) <= 2:
        return [(0, batch)]
    cut = cut or partial(slice_samples, num_samples=num_samples)
    return [(start, cut(batch, start, end)) for start, end in pairwise(bounds)]


def slice_samples(batch: Any, start: int, end: int, num_samples: int) -> Any:
    """Return samples `start` to `end - 1` of a batch, as views of its tensors.

    Args:
        batch: a batch of tensors whose dimension 0 is `num_samples`, of lists of as many samples or texts, and of
            objects that can be sliced. Zero-dimensional tensors and plain values stay as they are.
        start: the first sample.
        end: index of the last sample plus one.
        num_samples: the number of samples in the batch.

    Raises:
        ValueError: a tensor of the batch has a different size in dimension 0, or is sparse.
        TypeError: an object in the batch cannot be sliced.
    """

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            return tensor
        if tensor.layout not in (torch.strided, torch.jagged):
            kind = str(tensor.layout).removeprefix("torch.")
            remedy = "override Model.slice_batch, or use grad_accum=1"
            raise ValueError(f"cannot split a batch that holds a tensor of layout {kind}: {remedy}")
        if tensor.size(0) != num_samples:
            shape = (tensor.size(0), "...") if tensor.is_nested else tuple(tensor.shape)
            raise ValueError(
                f"cannot split a batch of {num_samples} samples: a tensor in it has shape {shape}. "
                "Dimension 0 of all must count samples; or override Model.slice_batch, or use grad_accum=1."
            )
        if tensor.is_nested:
            return torch.nested.as_nested_tensor([*tensor.unbind()][start:end], layout=tensor.layout)
        return tensor[start:end]

    def cut_object(one: Any) -> Any:
        if isinstance(one, Mapping):
            return None  # its tensors are cut, one by one
        part = one[start:end] if hasattr(one, "__getitem__") else None
        if type(part) is not type(one):
            raise TypeError(
                f"cannot split a batch that holds a {type(one).__name__}: let its class return an instance for "
                "batch[start:end], override Model.slice_batch, or use grad_accum=1 and microbatch_size=None."
            )
        return part

    return map_samples(batch, num_samples, cut, lambda items: items[start:end], cut_object)


def map_samples(
    batch: Any,
    num_samples: int,
    function: Callable[[Tensor], Any],
    pick: Callable[[Sequence[Any]], Any],
    objects: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a batch of the same nesting with `function` applied to its tensors, and `pick` to its lists of samples.

    A list of samples has `num_samples` items, or as many texts. For `objects` see `map_tensors`.
    """
    columns = [*_columns(batch)]
    lists = [one for one in columns if isinstance(one, tuple | list) and len(one) == num_samples]
    # If a list is as long as the tensors in it, only the rest of the batch tells whether its items are samples.
    apart = [one for one in lists if {len(tensor) for tensor in tensors(one) if tensor.ndim} != {num_samples}]
    is_stacked = any(isinstance(one, Tensor) for one in columns)
    chosen = {id(one) for one in (apart if is_stacked else lists if any(map(_readings, apart)) else apart)}
    return map_tensors(batch, function, lambda items: pick(items) if id(items) in chosen else None, objects)
