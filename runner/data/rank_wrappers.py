"""Wrappers that declare which samples each rank reads, for loaders without an `order`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from runner.distributed.shares import Reading
from runner.failures.checks import refuse_if


class _Wrapper:
    """Base of the wrappers: yields the batches of another loader and has all its attributes.

    Args:
        loader: any iterable of batches.

    Raises:
        TypeError: the loader is not iterable.
        ValueError: the loader divides its samples among the ranks itself.
    """

    ranks_read: Reading

    def __init__(self, loader: Iterable[Any]) -> None:
        kind = type(loader).__name__
        refuse_if(not hasattr(loader, "__iter__"), "loader", loader, "must be iterable, yielding batches", TypeError)
        if hasattr(loader, "order") or hasattr(loader, "ranks_read"):
            raise ValueError(f"loader={kind}: already declares what ranks read; leave out {type(self).__name__}")
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, for example while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)


class Sharded(_Wrapper):
    """A loader that yields different samples on each rank.

    The shares may differ in size: the ranks add up the sizes of their batches, and a rank that has run out of batches
    waits for the others with weight 0. So each sample counts once, in training and in evaluation.

    Args:
        loader: any iterable of batches, such as a DataLoader over the files that belong to this rank.

    Raises:
        TypeError: the loader is not iterable.
        ValueError: the loader divides its samples among the ranks itself.
    """

    ranks_read = "shares"


class Replicated(_Wrapper):
    """A loader that yields the same batches on all ranks, for evaluation and prediction.

    Each of n ranks reads all batches and evaluates every n-th of them, so each sample counts once.

    Args:
        loader: any iterable of batches, the same on all ranks and in the same order.

    Raises:
        TypeError: the loader is not iterable.
        ValueError: the loader divides its samples among the ranks itself.
    """

    ranks_read = "everything"
