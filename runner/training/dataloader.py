"""One interface to any dataloader: start at any batch of any epoch, move batches to the device, count samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from runner.core.randomness import ForwardStream, stream_seed
from runner.device.batch import count_samples
from runner.device.prefetch import open_loader
from runner.distributed import shares
from runner.distributed.ranks import get_data_parallel_size, get_world_size
from runner.failures.checks import name_of_loader, refuse_if, warn_if_endless
from runner.models.model import Model
from runner.training.precision import Precision


class BatchStream:
    """Reads batches from a dataloader.

    This project's loaders have `order` (a `SampleOrder`) and `seek`: they start at any batch without reading the
    earlier ones, and know how many samples each rank has. Any other iterable of batches works too. Its sampler's
    `set_epoch` is called, and batches before the start are read and dropped. With several ranks, its attribute
    `ranks_read` declares what each rank reads, see `runner.data.Sharded` and `runner.data.Replicated`; without this
    attribute, its sampler must divide the samples into shares of equal size (`DistributedSampler`).

    While a batch is read, such an iterable, or the transform of a loader of this project, may draw from torch's
    generators: what it draws depends only on the seed, the epoch and the batch. Persistent workers of a plain
    DataLoader are the exception: they keep their own generators from one epoch to the next.

    Args:
        loader: the dataloader, which yields this rank's batches.
        device: the device to which batches are moved.
        precision: the precision, which determines the dtype to which floating-point tensors are cast.
        num_samples: a function that counts the samples of a batch. With the default, `Model.num_samples`, the number
            must be clear from the first batch, see `count_samples`.
        label: 'train', an evaluator's label, or 'predict'.
        seed: the seed for random draws while reading batches; equal on all ranks, as samplers may require.
        subset_num_batches: the number of batches after which a pass over the loader ends; None: all. An endless loader
            gets passes of this length.

    Raises:
        TypeError: the loader is not iterable.
        ValueError: the loader is empty, does not declare what ranks read, or would repeat samples in an evaluation.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        precision: Precision,
        num_samples: Callable[[Any], int],
        label: str,
        seed: int = 0,
        subset_num_batches: int | None = None,
    ) -> None:
        reason = "must be iterable, yielding batches; put a data set into a DataLoader or a runner.data.DatasetLoader"
        refuse_if(not hasattr(loader, "__iter__"), name_of_loader(label), loader, reason, TypeError)
        self._world_size = get_data_parallel_size()
        group = get_world_size() // self._world_size
        shares.refuse_unsharded(loader, label, self._world_size, group)
        self.ranks_read: shares.Reading | None = getattr(loader, "ranks_read", None) if self._world_size > 1 else None
        """The loader's declaration of what each of several ranks reads; None if it declares nothing."""
        self._limit = subset_num_batches
        self.loader = loader
        self.label = label
        self._name = name_of_loader(label)
        # An empty training loader fails at its first batch; an empty evaluation loader would fail after a whole epoch.
        self._is_empty = self.ranks_read == "shares" and label != "train" and shares.is_empty(loader)
        self.length = self._find_length()
        """Batches of the current pass on each rank, read when the pass starts; None if the loader has no length."""
        if self.length == 0:
            raise ValueError(f"{self._name} has no batches: its data set is empty, or with drop_last=True too small")
        self._device = device
        self._started = False
        order = getattr(loader, "order", None)
        if order is not None and hasattr(order, "give_same_samples"):
            order.give_same_samples(group)
        is_default = getattr(num_samples, "__func__", None) is Model.num_samples
        self._num_samples = count_samples if is_default else num_samples
        self._own_counts = self._count_first if is_default else self._count
        counts = self._own_counts if self.ranks_read is None else self._count_share
        self.counts: Callable[[int, Any], tuple[int, int]] = counts if order is None else order.counts
        """Takes a batch's index in its epoch and the batch, and returns its number of samples on this rank and on all
        ranks. If this rank has 0 samples, the batch only stands in for an empty share."""
        self._cast = precision.cast if precision.weight_dtype is not None else None
        self._seed = seed
        self._draws = order is None or getattr(loader, "transform", None) is not None
        self._iterate, self._move = open_loader(loader, device)

    def seek(self, epoch: int, batch: int) -> None:
        """Move the loader to a batch of an epoch, and read the length of this epoch. Call it on all ranks."""
        loader: Any = self.loader
        if hasattr(loader, "seek"):
            loader.seek(epoch, batch)
        elif not hasattr(loader, "__next__"):
            shares.set_epoch(loader, epoch)
        self.length = self._find_length()

    def start(self, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
        """Return an iterator over an epoch's batches on the device, starting at a given batch. Call it on all ranks."""
        self.seek(epoch, batch)
        first = batch if hasattr(self.loader, "seek") else 0  # the batch that the loader yields next
        if hasattr(self.loader, "__next__"):  # an iterator continues where it stopped; a resumed run's is at epoch 0
            first = batch if self._started else -epoch * (self._limit or 0)
        self._started = True
        batches = self._read(epoch, first) if self._draws else self._iterate()
        if self._limit is not None:
            batches = itertools.islice(batches, max(batch, self._limit) - first)
        if self.ranks_read is not None:
            batches = self._share(batches, self.ranks_read)
        if batch > first:
            batches = itertools.islice(batches, batch - first, None)
        if self.length is None and self.label != "train":  # training ends at max_duration, whatever the loader does
            batches = warn_if_endless(batches, self._name)
        batches = batches if self._move is None else map(self._move, batches)
        return batches if self._cast is None else map(self._cast, batches)

    def _find_length(self) -> int | None:
        length = 0 if self._is_empty else shares.length_of(self.loader)
        if self._limit is not None and length != 0:
            length = min(length or self._limit, self._limit)
        return length if self.ranks_read is None else shares.length_of_shares(self.ranks_read, length, self._name)

    def _read(self, epoch: int, batch: int) -> Iterator[Any]:
        """Yield batches, starting at number `batch`; before each is read, seed torch's generators."""
        for reader in (self.loader, shares.find_sampler(self.loader)):
            if isinstance(generator := getattr(reader, "generator", None), torch.Generator):
                generator.manual_seed(stream_seed(self._seed, "order", epoch))
        stream = ForwardStream(self._seed, self._device, "dataloader", epoch)
        stream.start(0, 0)
        batches = self._iterate()
        for number in itertools.count(batch):
            stream.start(number, 0)
            try:
                yield next(batches)
            except StopIteration:
                return

    def _share(self, batches: Iterator[Any], reading: shares.Reading) -> Iterator[Any]:
        """Yield this rank's share of each batch. Call it on all ranks."""
        for share in shares.read_shares(reading, batches, lambda b: self._own_counts(0, b)[0], self._name, self.loader):
            self._read_share = share
            yield share.batch

    def _count_share(self, index: int, batch: Any) -> tuple[int, int]:
        return self._read_share.samples, self._read_share.all_samples

    def _count_first(self, index: int, batch: Any) -> tuple[int, int]:
        count_samples(batch, strict=True)
        self._own_counts = self._count  # later batches are counted in the same way, even ambiguous ones
        if self.ranks_read is None:
            self.counts = self._count
        return self._count(index, batch)

    def _count(self, index: int, batch: Any) -> tuple[int, int]:
        samples = self._num_samples(batch)
        return samples, samples * self._world_size
