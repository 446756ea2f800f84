"""The order of samples, a function of (seed, epoch) alone, and each rank's share of it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from runner.core.randomness import stream_seed
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument


class SampleOrder:
    """Says which samples make up each batch of each epoch, on each rank.

    The order of an epoch depends only on the seed and the epoch's number: it is the same for any number of ranks and
    workers, and any batch can be read without reading those before it. Each rank takes a contiguous share of every
    global batch; shares differ by at most one sample and add up to the global batch. So each sample is seen exactly
    once in an epoch, or at most once with `drop_last`.

    A rank whose share is empty (a last batch with fewer samples than ranks) gets the batch's first sample, so that all
    ranks run the same number of steps; `counts` returns 0 for it.

    Args:
        num_samples: size of the data set.
        batch_size: samples in a global batch, all ranks together.
        shuffle: whether to shuffle in each epoch; otherwise the order is 0, 1, 2, ...
        drop_last: whether to leave out an incomplete last batch.
        seed: seed of the order, at least 0.
        rank: this process's number; None is the environment's `RANK`, or 0.
        world_size: the number of processes; None is the environment's `WORLD_SIZE`, or 1.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or the data set does not fill a single batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        rank = _from_environment("RANK", 0) if rank is None else rank
        world_size = _from_environment("WORLD_SIZE", 1) if world_size is None else world_size
        if num_samples == 0:
            raise ValueError("num_samples=0: the data set is empty")
        _require_int("num_samples", num_samples, 1)
        _require_int("batch_size", batch_size, 1)
        _require_int("seed", seed, 0)
        _require_int("world_size", world_size, 1)
        _require_int("rank", rank, 0)
        refuse_if(rank >= world_size, "rank", rank, f"must be less than world_size={world_size!r}: ranks count from 0")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self._process = rank, world_size
        self.give_same_samples(1)
        self.resize(num_samples)

    @classmethod
    def of(cls, samples: Tensor) -> SampleOrder:
        """Return the order of one batch, on one rank, of the given samples `(n,)`, int64, n at least 1."""
        order = cls(len(samples), len(samples), rank=0, world_size=1)
        order._epoch = 0
        order._permutation = samples
        return order

    def give_same_samples(self, ranks: int) -> None:
        """Give each group of `ranks` consecutive ranks the same samples; `world_size` must be a multiple of `ranks`."""
        rank, world_size = self._process
        self.rank = rank // ranks
        self.world_size = world_size // ranks
        self._full_counts = self._share(self.batch_size)

    def resize(self, num_samples: int) -> None:
        """Change the number of samples.

        Raises:
            ValueError: they do not fill a single batch.
        """
        size = self.batch_size
        if self.drop_last and num_samples < size:
            raise ValueError(
                f"batch_size={size!r} with drop_last=True leaves no batch of num_samples={num_samples!r}: "
                "lower batch_size, or set drop_last=False"
            )
        self.num_samples = num_samples
        self._num_batches = num_samples // size if self.drop_last else -(-num_samples // size)
        self._num_full = num_samples // size
        self._epoch: int | None = None
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on all ranks."""
        return self._num_batches

    def permutation(self, epoch: int) -> Tensor:
        """Return the order of an epoch over all ranks: sample numbers `(num_samples,)`, int64, on the CPU.

        Raises:
            ValueError: the epoch is negative.
        """
        if epoch != self._epoch:
            _require_int("epoch", epoch, 0)
            if not self.shuffle:
                self._permutation = torch.arange(self.num_samples)
            else:
                generator = torch.Generator().manual_seed(stream_seed(self.seed, "order", epoch))
                self._permutation = torch.randperm(self.num_samples, generator=generator)
            self._epoch = epoch
        return self._permutation

    def read_all_in_sequence(self) -> None:
        """Make every epoch read all samples in the order 0, 1, 2, ..., as prediction needs, ignoring the arguments."""
        self.shuffle = self.drop_last = False
        self._num_batches = -(-self.num_samples // self.batch_size)
        self._epoch = None

    def span(self, batch: int) -> tuple[int, int]:
        """Return this rank's share of a batch as positions in the epoch's order: the first and one past the last.

        For an empty share, they span the batch's first sample.

        Raises:
            IndexError: an epoch has no batch of that number.
        """
        first, size = self._global_batch(batch)
        start = first + size * self.rank // self.world_size
        stop = first + size * (self.rank + 1) // self.world_size
        return (start, stop) if stop > start else (first, first + 1)

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Return this rank's samples of a batch `(n,)`, int64, n at least 1.

        Args:
            epoch: at least 0.
            batch: number of the batch within the epoch, in [0, `len(order)`).

        Raises:
            ValueError: the epoch is negative.
            IndexError: an epoch has no batch of that number.
        """
        start, stop = self.span(batch)
        return self.permutation(epoch)[start:stop]

    def counts(self, batch: int, content: Any = None) -> tuple[int, int]:
        """Return how many samples of a batch count on this rank, and how many on all ranks together.

        `content` is unused here; other orders need the batch itself to count its samples.

        Raises:
            IndexError: an epoch has no batch of that number.
        """
        if 0 <= batch < self._num_full:
            return self._full_counts
        return self._share(self._global_batch(batch)[1])

    def _share(self, size: int) -> tuple[int, int]:
        return size * (self.rank + 1) // self.world_size - size * self.rank // self.world_size, size

    def _global_batch(self, batch: int) -> tuple[int, int]:
        if not 0 <= batch < self._num_batches:
            raise IndexError(f"batch={batch!r} is out of range: an epoch has batches 0 to {self._num_batches - 1}")
        first = batch * self.batch_size
        return first, min(self.batch_size, self.num_samples - first)


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment must be an integer") from None


def _require_int(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_argument(name, value, f"must be an integer, not {type(value).__name__}", TypeError)
    if value < minimum:
        raise wrong_argument(name, value, f"must be at least {minimum}")
