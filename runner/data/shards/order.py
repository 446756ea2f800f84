"""An order of samples that is computed block by block, so that any batch of a huge data set is found quickly."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.core.randomness import stream_seed
from runner.data.order import SampleOrder
from runner.failures.checks import check_whole


class BlockOrder(SampleOrder):
    """A `SampleOrder` that mixes the samples of a few blocks at a time, such as the shards that a cache can hold.

    In each epoch the blocks are shuffled and divided into groups, and the samples of each group are shuffled. So an
    epoch is never drawn as a whole: a batch needs only the order of the blocks and the order within its group.

    Within a global batch, samples are in the order of their numbers. As a rank's share is a contiguous part, it reads
    from its own part of a group's blocks, and the machines of a cluster fetch few blocks in common.

    Args:
        sizes: number of samples in each block, in the order of the sample numbers, at least 1 each.
        mixed: number of blocks whose samples are mixed, at least 1.
        batch_size: see `SampleOrder`, as for the other arguments.

    Attributes:
        blocks: describes the blocks and their mixing; a run resumed mid-epoch needs the same.

    Raises:
        TypeError, ValueError: `SampleOrder` refuses an argument.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mixed: int,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._sizes = numpy.asarray(sizes, numpy.int64)
        self._starts = numpy.cumsum(self._sizes) - self._sizes
        self._mixed = mixed
        self.blocks = f"{len(sizes)} of sizes {zlib.crc32(self._sizes.tobytes()):08x}, {mixed} mixed"
        self._plans: dict[tuple[int, bool], tuple[NDArray[numpy.int64], NDArray[numpy.int64]]] = {}
        self._groups: dict[tuple[int, int], Tensor] = {}
        super().__init__(int(self._sizes.sum()), batch_size, shuffle, drop_last, seed, rank, world_size)

    def resize(self, num_samples: int) -> None:
        """Refuse another number of samples."""
        if num_samples != self._sizes.sum():
            raise ValueError("folds cannot redistribute samples in shards: create separate shards for each part")
        super().resize(num_samples)

    def permutation(self, epoch: int) -> Tensor:
        """Draw and return the order of a whole epoch over all ranks, int64 `(num_samples,)`."""
        firsts = range(0, self.num_samples, self.batch_size)
        return torch.cat([self._global_indices(epoch, first, self.batch_size) for first in firsts])

    def indices(self, epoch: int, batch: int) -> Tensor:
        """Return this rank's samples of a batch `(n,)`, int64, n at least 1, ascending."""
        first, size = self._global_batch(batch)
        start, stop = self.span(batch)
        return self._global_indices(epoch, first, size)[start - first : stop - first]

    def upcoming(self, epoch: int, batch: int) -> tuple[list[int], list[int], int]:
        """Return the blocks that this rank reads now and next, and the batch at which 'next' becomes 'now'.

        As the samples of a global batch are random, a rank may also read a few of its neighbors' blocks.

        Args:
            epoch: at least 0.
            batch: number of the batch within the epoch, in [0, `len(order)`).

        Returns:
            The blocks of the batch's group; those of the next group, which may be in the next epoch; and the first
            batch with samples of that group, past the last batch if the group is in the next epoch.
        """
        _, ends = self._plan(epoch)
        group = int(numpy.searchsorted(ends, batch * self.batch_size, "right"))
        is_last = group + 1 == len(ends)
        following = self._share_of(epoch + 1, 0) if is_last else self._share_of(epoch, group + 1)
        due = max(batch + 1, int(ends[group]) // self.batch_size)
        return self._share_of(epoch, group), following, due

    def _share_of(self, epoch: int, group: int) -> list[int]:
        """Return the blocks of a group that this rank reads, if each batch samples the group evenly."""
        blocks = numpy.sort(self._plan(epoch)[0][group * self._mixed : (group + 1) * self._mixed])
        ends = numpy.cumsum(self._sizes[blocks]) * self.world_size
        total = ends[-1] // self.world_size
        starts = ends - self._sizes[blocks] * self.world_size
        return blocks[(ends > self.rank * total) & (starts < (self.rank + 1) * total)].tolist()

    def _plan(self, epoch: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Return the order of an epoch's blocks, and the number of samples up to the end of each group."""
        key = epoch, self.shuffle
        if key not in self._plans:
            order = numpy.arange(len(self._sizes))
            if self.shuffle:
                order = torch.randperm(len(order), generator=self._generator(epoch)).numpy()
            ends = numpy.cumsum(self._sizes[order])
            last = numpy.minimum(numpy.arange(0, len(order), self._mixed) + self._mixed, len(order)) - 1
            self._plans = {**dict(list(self._plans.items())[-1:]), key: (order, ends[last])}
        return self._plans[key]

    def _global_indices(self, epoch: int, first: int, size: int) -> Tensor:
        """Return the samples at `size` positions of an epoch's order from `first` on, ascending."""
        stop = min(first + size, self.num_samples)
        check_whole("epoch", epoch, 0)
        if not self.shuffle:
            return torch.arange(first, stop)
        _, ends = self._plan(epoch)
        parts = []
        for group in range(int(numpy.searchsorted(ends, first, "right")), len(ends)):
            begin = int(ends[group - 1]) if group else 0
            if begin >= stop:
                break
            parts.append(self._group(epoch, group)[max(0, first - begin) : stop - begin])
        return torch.cat(parts).sort().values

    def _group(self, epoch: int, group: int) -> Tensor:
        """Return the samples of a group of blocks in shuffled order."""
        key = epoch, group
        if key not in self._groups:
            blocks = self._plan(epoch)[0][group * self._mixed : (group + 1) * self._mixed]
            spans = ((int(self._starts[block]), int(self._sizes[block])) for block in blocks)
            samples = torch.cat([torch.arange(start, start + size) for start, size in spans])
            order = torch.randperm(len(samples), generator=self._generator(epoch, group))
            self._groups = {**dict(list(self._groups.items())[-1:]), key: samples[order]}
        return self._groups[key]

    def _generator(self, *counters: int) -> torch.Generator:
        return torch.Generator().manual_seed(stream_seed(self.seed, "order", *counters))
