"""Move, count and split batches of any nesting. Tensors are sliced into views if possible, not copied.

Samples are either stacked along dimension 0 of tensors, or separate items of a list if their sizes differ. Any other
object may be a batch, or a part of one, if it has a method `to(device)` that returns it on a device, such as a batch of
graphs. `len(batch)` is then its number of samples, and `batch[start:end]` returns some of them; a model can override
both, see `Model.num_samples` and `Model.slice_batch`.
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
        function: returns the replacement of a tensor.
        lists: returns the replacement of a tuple or list, or None to map its items; without it, the items of all tuples
            and lists are mapped.
        objects: returns the replacement of an object with a method `to`, or None to map it as a mapping, tuple or list;
            without it, all objects are mapped this way.

    Raises:
        TypeError: the batch contains something other than tensors, tuples, lists, mappings and plain values, and
            `objects` does not replace it.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if objects is not None and _is_movable(batch) and (replacement := objects(batch)) is not None:
        return replacement
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, lists, objects) for value in batch))
    if isinstance(batch, tuple | list):
        if lists is not None and (replacement := lists(batch)) is not None:
            return replacement
        return type(batch)(map_tensors(value, function, lists, objects) for value in batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, lists, objects) for key, value in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, numpy.generic):
        return batch.item()  # numpy's float64 is also a float, but only pickle could store it in a checkpoint
    if batch is None or isinstance(batch, str | bytes | bool | int | float):
        return batch
    raise UnsupportedType(_explain_refusal(batch), type(batch).__name__)


def _is_movable(batch: Any) -> bool:
    return callable(getattr(batch, "to", None))  # a mapping may offer its keys as attributes, and one may be `to`


def _explain_refusal(batch: Any) -> str:
    """Return why a part of a batch cannot be handled, and what to do."""
    kind = type(batch).__name__
    allowed = "a tensor, or a tuple, list or mapping of tensors"
    if _is_movable(batch):
        reason = "precision='bf16' and some algorithms have to change the tensors of a batch, and cannot look into it"
        return f"a batch holds a {kind}: {reason}; give it {allowed} instead, or leave out what changes them"
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
    """Return the number of samples: the size of dimension 0 of a batch's first tensor, or the length of its lists.

    Args:
        batch: a batch of any nesting. If each of its parts is a list of similar items, the items are the samples; the
            samples of a `PackedSequence` are its sequences.
        strict: whether to refuse ambiguous batches as well.

    Raises:
        TypeError: the batch contains no tensor with a dimension and no object with a length, or, if `strict`, its
            number of samples is ambiguous.
    """
    if not strict:  # the fast path, used for every batch: most batches start with a tensor
        first = batch[0] if type(batch) in (tuple, list) and batch else batch
        if not isinstance(first, Tensor) or not first.ndim:
            first = next((column for column in _columns(batch) if isinstance(column, Tensor)), None)
        if first is not None:
            return first.size(0)
    columns = [*_columns(batch)]
    lengths = [_length(column) for column in columns if not isinstance(column, tuple | list)]
    lists = [column for column in columns if isinstance(column, tuple | list)]
    possible_counts = [counts for items in lists if (counts := _possible_counts(items))]
    if lengths:
        must_agree = _are_alike(batch) or any(not isinstance(column, Tensor | tuple | list) for column in columns)
        counts = {*lengths} if must_agree else {lengths[0]}
        count = lengths[0]
    elif possible_counts:
        counts = set.intersection(*possible_counts)
        counts = counts & {len(items) for items in lists if not _possible_counts(items)} or counts  # texts or numbers
        count = min(counts) if len(counts) == 1 else len(lists[0])
    else:
        raise TypeError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a dimension. "
            "A batch is a tensor, or a tuple, list or mapping of tensors, or an object with to(device) and len(); "
            "otherwise override Model.num_samples."
        )
    if strict and len(counts) != 1:
        numbers = " or ".join(map(str, sorted(counts))) or "no number that all its parts agree on"
        raise TypeError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it may hold {numbers}. "
            "Override Model.num_samples, which returns the number of samples in a batch."
        )
    return count


def _columns(batch: Any, is_nested: bool = False) -> Iterator[Any]:
    """Yield the parts of a batch whose length may be the number of samples: tensors, objects, lists of similar items.

    Zero-dimensional tensors are left out. If the batch itself is a tuple or list that starts with a tensor, its items
    are columns, as torch's default collation makes them.
    """
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _columns(value, True)
    elif type(batch) is not tuple and isinstance(batch, PackedSequence):
        yield batch.data[: int(batch.batch_sizes[0])]  # the first item of each sequence; `batch_sizes` is on the CPU
    elif isinstance(batch, tuple | list):
        is_collated = not is_nested and len(batch) > 0 and isinstance(batch[0], Tensor)
        if not is_collated and not hasattr(batch, "_fields") and _are_alike(batch):
            yield batch
        else:
            for value in batch:
                yield from _columns(value, True)
    elif _is_sized_object(batch):
        yield batch


def _is_sized_object(batch: Any) -> bool:
    """Return whether an object has a method `to` and a length, but is not a tensor or a container of tensors."""
    is_container = isinstance(batch, Tensor | Mapping | tuple | list)
    return not is_container and _is_movable(batch) and hasattr(batch, "__len__")


def _length(column: Any) -> int:
    return column.size(0) if isinstance(column, Tensor) else len(column)  # a nested tensor has no len()


def _are_alike(batch: Any) -> bool:
    """Return whether a batch is a tuple or list of items of one kind."""
    return isinstance(batch, tuple | list) and len({_kind(item) for item in batch} - {_EMPTY}) == 1


_EMPTY: tuple[Any, ...] = ("list",)


def _kind(item: Any) -> Any:
    """Return a key that is equal for items of the same structure, whatever their sizes."""
    if isinstance(item, Tensor):
        return item.ndim, item.dtype
    if isinstance(item, Mapping):
        return frozenset(item)
    if isinstance(item, tuple | list):
        return *_EMPTY, *dict.fromkeys(_kind(part) for part in item)
    return "text" if isinstance(item, str | bytes) else type(item)


def _possible_counts(items: Sequence[Any]) -> set[int]:
    """Return the possible numbers of samples in a list of similar items; empty if the items have no sizes."""
    sized = [item for item in items if _is_sized_object(item)] or [tensor for tensor in tensors(items) if tensor.ndim]
    sizes = {_length(item) for item in sized}
    if not sizes and not any(True for _ in tensors(items)):
        return set()
    inner = {len(item) if _are_alike(item) else 0 for item in items} - {0}
    return {len(items)} | (sizes if len(sizes) == 1 else set()) | (inner if len(inner) == 1 else set())


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; pinned tensors are copied asynchronously, and objects by their method `to`."""
    kind = type(batch)
    if kind in (tuple, list) and not [item for item in batch if type(item) is not Tensor or item.device != device]:
        return kind(batch)  # the fast path: all tensors are on the device already

    def move(item: Any) -> Any:
        moved = item.to(device)
        return item if moved is None else moved  # `to` may have moved it in place

    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True), objects=move)


Cut = Callable[[Any, int, int], Any]
"""Returns samples of a batch, given the index of the first and one past the last."""


def split(
    batch: Any, num_samples: int, cut: Cut | None = None, parts: int | None = None, size: int | None = None
) -> list[tuple[int, Any]]:
    """Return microbatches as pairs (index of the first sample, part of the batch); a single one is the batch itself.

    Args:
        batch: a batch of any kind.
        num_samples: number of samples in the batch.
        cut: returns the samples of a microbatch, such as `Model.slice_batch`; None: `slice_samples`.
        parts: number of microbatches, fewer if there are fewer samples. Their sizes differ by at most one.
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
        batch: a batch of tensors whose dimension 0 has size `num_samples`, lists of `num_samples` samples or texts, and
            objects that can be sliced. Zero-dimensional tensors and plain values do not change.
        start: index of the first sample.
        end: index of the last sample plus one.
        num_samples: number of samples in the batch.

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

    def cut_object(item: Any) -> Any:
        if isinstance(item, Mapping):
            return None  # cut each of its tensors
        part = item[start:end] if hasattr(item, "__getitem__") else None
        if type(part) is not type(item):
            raise TypeError(
                f"cannot split a batch that holds a {type(item).__name__}: let its class return an instance for "
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

    A list of samples has `num_samples` items or texts. For `objects` see `map_tensors`.
    """
    columns = [*_columns(batch)]
    lists = [column for column in columns if isinstance(column, tuple | list) and len(column) == num_samples]
    # If a list is as long as the tensors in it, the other parts of the batch decide whether its items are samples.
    separate = [items for items in lists if {len(tensor) for tensor in tensors(items) if tensor.ndim} != {num_samples}]
    is_stacked = any(isinstance(column, Tensor) for column in columns)
    sampled = lists if not is_stacked and any(map(_possible_counts, separate)) else separate
    chosen = {id(items) for items in sampled}
    return map_tensors(batch, function, lambda items: pick(items) if id(items) in chosen else None, objects)
