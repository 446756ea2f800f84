"""The tensors behind a loader, and a digest of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device.batch import tensors
from runner.distributed.ranks import get_data_parallel_size

MOST_BYTES = 1 << 22  # bytes of each tensor that a digest reads
MOST_TENSORS = 1000


def digest(content: Sequence[Tensor]) -> str:
    """Return a digest of the shapes, types and values of tensors: 16 hexadecimal digits.

    A tensor above 4 MiB is sampled evenly along dimension 0; of more than a thousand tensors, every n-th is read.
    Values on a device are copied to the CPU.
    """
    hasher = hashlib.blake2b(str(len(content)).encode(), digest_size=8)
    for tensor in content[:: -(-len(content) // MOST_TENSORS)]:
        hasher.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        rows = tensor.detach().reshape(-1) if tensor.ndim < 2 else tensor.detach()
        if tensor.nbytes > MOST_BYTES:
            count = max(1, MOST_BYTES * len(rows) // tensor.nbytes)
            rows = rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float64).long().to(tensor.device)]
        if tensor.numel():
            hasher.update(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def held_tensors(loader: Any) -> list[Tensor]:
    """Return the tensors from which a loader takes its samples.

    Raises:
        TypeError: the loader holds no tensors, but reads samples when they are needed.
    """
    loader = getattr(loader, "loader", loader)
    for owner in (loader, getattr(loader, "dataset", None)):
        held = owner if isinstance(owner, list | tuple) else getattr(owner, "tensors", None)
        if isinstance(held, list | tuple) and (content := list(tensors(held))):
            return content
    raise TypeError(f"{type(loader).__name__} holds no tensors")


def count_rows(loader: Any) -> int | None:
    """Return the number of samples in the data set of a loader; None if it is unknown."""
    order = getattr(loader, "order", None)
    if order is not None:
        return order.num_samples
    if hasattr(loader, "order_settings"):
        return None  # a stream
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def describe_samples(loader: Any, batches: int | None = None) -> str:
    """Describe how many samples a loader reads per epoch, such as '90 of 100 samples'; '' if that is unknown.

    `batches` is the number of batches after which an epoch ends; None: all. A loader with `drop_last` leaves out the
    samples of an incomplete batch.
    """
    samples = count_rows(loader)
    if samples is None:
        return ""
    order = getattr(loader, "order", None)
    # The batch size of an order counts all ranks.
    sizes, ranks = (loader, get_data_parallel_size()) if order is None else (order, 1)
    size = getattr(sizes, "batch_size", None)
    length = len(loader) if getattr(sizes, "drop_last", False) else None
    limits = [limit * size * ranks for limit in (batches, length) if limit is not None and isinstance(size, int)]
    read = min(samples, *limits) if limits else samples
    return f"{read:,} of {samples:,} samples" if read < samples else f"{samples:,} sample{'s' * (samples != 1)}"
