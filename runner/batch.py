"""What can be done with a batch, whatever its nesting: move, count, split. Nothing is copied where a view will do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor


def map_tensors(batch: Any, function: Callable[[Tensor], Any], texts: Callable[[Any], Any] | None = None) -> Any:
    """Return a batch of the same nesting with `function` applied to its tensors.

    Args:
        batch: any nesting.
        function: is given each tensor.
        texts: is given each tuple or list of nothing but texts, as a rule one for each sample; None: they stay.

    Raises:
        TypeError: something in it is neither a tensor, tuple, list nor mapping, nor a plain value.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function, texts) for key, value in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function, texts) for value in batch))
    if isinstance(batch, tuple | list) and texts is not None and all(isinstance(one, str | bytes) for one in batch):
        return texts(batch)
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function, texts) for value in batch)
    if isinstance(batch, numpy.generic):
        return batch.item()  # numpy's float64 is a float too, but could be read from a checkpoint by unpickling only
    if batch is None or isinstance(batch, str | bytes | bool | int | float):
        return batch
    raise TypeError(
        f"a batch holds a {type(batch).__name__}; it must be a tensor, or a tuple, list or mapping of tensors. "
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


def count_samples(batch: Any) -> int:
    """Return the size of dimension 0 of a batch's first tensor that has one.

    Raises:
        TypeError: there is none.
    """
    for tensor in tensors(batch):
        if tensor.ndim > 0:
            return tensor.shape[0]
    raise TypeError(
        f"cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor with a dimension. "
        "A batch is a tensor, or a tuple, list or mapping of tensors; otherwise override Model.num_samples."
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device; pinned tensors are copied without waiting."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, num_samples: int, parts: int | None = None, size: int | None = None) -> list[tuple[int, Any]]:
    """Return microbatches as (index of the first sample, views of the batch), the whole batch itself if it is one.

    Args:
        batch: tensors whose dimension 0 is `num_samples`, and lists of as many texts; zero-dimensional tensors and
            plain values go to every part.
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

        return map_tensors(batch, cut, lambda texts: texts[start:end] if len(texts) == num_samples else texts)

    return [(start, part(start, end)) for start, end in pairwise(bounds)]
