"""The tensors behind a loader, and a digest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device.batch import tensors
from runner.distributed.ranks import get_data_parallel_size

MOST_BYTES = 1 << 22  # of a tensor that its digest reads
MOST_TENSORS = 1000


def digest(content: Sequence[Tensor]) -> str:
    """Return a digest of the shapes, types and values of tensors, of 16 hexadecimal digits.

    Of a tensor above 4 MiB it reads samples that are evenly spread, and of more than a thousand tensors every n-th.
    What is on a device is copied from there.
    """
    whole = hashlib.blake2b(str(len(content)).encode(), digest_size=8)
    for one in content[:: -(-len(content) // MOST_TENSORS)]:
        whole.update(f"{tuple(one.shape)} {one.dtype}".encode())
        samples = one.detach().reshape(-1) if one.ndim < 2 else one.detach()
        if one.nbytes > MOST_BYTES:
            kept = max(1, MOST_BYTES * len(samples) // one.nbytes)
            samples = samples[torch.linspace(0, len(samples) - 1, kept, dtype=torch.float64).long().to(one.device)]
        if one.numel():
            whole.update(samples.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def held_tensors(loader: Any) -> list[Tensor]:
    """Return the tensors that a loader takes its samples from.

    Raises:
        TypeError: the loader reads samples as they are needed.
    """
    loader = getattr(loader, "loader", loader)
    for one in (loader, getattr(loader, "dataset", None)):
        found = one if isinstance(one, list | tuple) else getattr(one, "tensors", None)
        if isinstance(found, list | tuple) and (content := list(tensors(found))):
            return content
    raise TypeError(f"{type(loader).__name__} holds no tensors")


def count_rows(loader: Any) -> int | None:
    """Return how many samples the data set of a loader has; None if it does not tell."""
    order = getattr(loader, "order", None)
    if order is not None:
        return order.num_samples
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def describe_samples(loader: Any, batches: int | None = None) -> str:
    """Return how many samples an epoch of a loader reads, and of how many if it leaves any out; '' if unknown.

    `batches` is the number of batches after which an epoch ends; None: all. A loader with `drop_last` leaves out the
    samples of an incomplete batch.
    """
    samples = count_rows(loader)
    if samples is None:
        return ""
    order = getattr(loader, "order", None)
    sizes, ranks = (loader, get_data_parallel_size()) if order is None else (order, 1)  # whose batches are of all ranks
    size = getattr(sizes, "batch_size", None)
    length = len(loader) if getattr(sizes, "drop_last", False) else None
    limits = [limit * size * ranks for limit in (batches, length) if limit is not None and isinstance(size, int)]
    read = min(samples, *limits) if limits else samples
    return f"{read:,} of {samples:,} samples" if read < samples else f"{samples:,} sample{'s' * (samples != 1)}"
