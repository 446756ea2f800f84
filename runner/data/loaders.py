"""Data loaders that start at any batch of any epoch, and yield the same batches for any number of processes."""

from __future__ import annotations

import copy
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from runner.data.order import SampleOrder
from runner.data.picking import pick_batches
from runner.data.seeded_batches import SeededBatches, Transform
from runner.data.workers import BatchKeys, BatchReader, WorkerPool
from runner.device.memory import free_bytes
from runner.failures.checks import check_whole
from runner.failures.errors import wrong_argument

log = logging.getLogger("runner")

RESIDENT_SHARE = 0.25  # fraction of a device's free memory that the data of one loader may take


class OrderedLoader(ABC):
    """Base of the loaders: a `SampleOrder`, and the position at which the next iteration starts.

    Each `iter()` runs to the end of one epoch. Without a `seek` in between, the next one starts the following epoch.

    Attributes:
        order: says which samples make up each batch, and how many of them count.
        transform: function that is applied to each batch, or None.
        equal_targets: whether each sample has the same number of targets and the loss counts all of them, as with
            windows of a text. If so, ranks that train a language model need not sum their target counts. Defaults to
            the transform's attribute of the same name, or False if it has none.
        preparation: how the images of an evaluation were prepared, if the data set does not say so itself.
        normalization: the `Normalization` of the images in a batch; None if unknown. Defaults to the transform's
            attribute of the same name.
    """

    preparation: Any = None

    def __init__(self, order: SampleOrder, transform: Transform | None = None) -> None:
        self.order = order
        self.transform = transform
        self.equal_targets: bool = getattr(transform, "equal_targets", False)
        self.normalization: Any = getattr(transform, "normalization", None)
        self._next = (0, 0)

    def __len__(self) -> int:
        """Return the number of batches in an epoch, the same on all ranks."""
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches, from the position set by `seek` to the end of that epoch."""
        return self._transformed(self._batches(*self._take_position()))

    def untransformed(self) -> Iterator[Any]:
        """Return the iterator that `iter()` would return, but without calling `transform`."""
        return self._batches(*self._take_position())

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Make the next `iter()` start at a batch of an epoch, without reading the batches before it.

        Args:
            epoch: at least 0.
            batch: number of the batch within the epoch, in [0, `len(loader)`]; at `len(loader)` nothing is left.

        Raises:
            ValueError: the epoch or the batch is out of range.
        """
        check_whole("epoch", epoch, 0)
        check_whole("batch", batch, 0, "a number of batches", most=len(self.order))
        self._next = (epoch, batch)

    def first(self, count: int) -> Iterator[Any]:
        """Return an iterator over this rank's first `count` batches of epoch 0, independent of other iterations."""
        return islice(self._transformed(self._batches(0, 0)), count)

    def pick(self, samples: Tensor) -> Any:
        """Return the given samples as one batch, read as in epoch 0, independent of other iterations.

        Args:
            samples: numbers of samples `(n,)`, int64, on the CPU; n at least 1.
        """
        loader = copy.copy(self)
        loader.order = SampleOrder.of(samples)
        return next(loader._transformed(loader._batches(0, 0)))

    @abstractmethod
    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Yield this rank's untransformed batches of an epoch from `first` on, independent of other iterations."""

    def _transformed(self, batches: Iterator[Any]) -> Iterator[Any]:
        transform = self.transform
        # Not map(): a StopIteration raised by the transform would silently end the epoch early.
        return batches if transform is None else (transform(batch) for batch in batches)

    def _take_position(self) -> tuple[int, int]:
        """Return the (epoch, batch) to start at, and set the position to the next epoch."""
        epoch, batch = self._next
        self._next = (epoch + 1, 0)
        return epoch, batch


class TensorLoader(OrderedLoader):
    """Batches of data that is kept in memory as tensors, on one device.

    A batch is a tuple with a slice of each tensor, or just the slice if there is only one tensor. Without shuffling it
    is a view of the data, not a copy: do not write into it.

    Small shuffled batches are copied several at a time, up to 128 KiB, into shared storage. They may be changed in
    place, but not resized. A write to the data shows only in batches copied afterwards. To keep or save a batch,
    `clone()` it: otherwise the whole storage is kept, and saved, with it.

    Args:
        *tensors: at least one tensor; samples along dimension 0, the same number in each.
        batch_size: samples in a global batch, all ranks together.
        shuffle: whether to draw a new order for each epoch.
        drop_last: whether to leave out an incomplete last batch.
        seed: seed of the order, at least 0.
        transform: `transform(batch)` returns the batch to yield; None yields the batch itself. In training it is called
            with a batch on the device.
        resident: whether all the data may be moved to the device, if it has room.
        rank: rank of this process; None means the environment's `RANK`, or 0.
        world_size: number of ranks; None means the environment's `WORLD_SIZE`, or 1.

    Attributes:
        resident: the argument, or False once the data has turned out not to fit on the device.

    Raises:
        ValueError: there is no tensor, lengths differ, or `SampleOrder` rejects an argument.
    """

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool,
        drop_last: bool = False,
        seed: int = 0,
        transform: Transform | None = None,
        resident: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not tensors or any(tensor.dim() == 0 for tensor in tensors):
            raise wrong_argument("tensors", tensors, "give at least one tensor, with the samples along dimension 0")
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise ValueError(f"the tensors have {lengths!r} samples: they must all have the same number")
        super().__init__(SampleOrder(lengths[0], batch_size, shuffle, drop_last, seed, rank, world_size), transform)
        self.tensors = tensors
        self.resident = resident

    def to(self, device: torch.device | str) -> TensorLoader:
        """Move the data to a device if `resident` and if it fits in a quarter of the free memory; return the loader."""
        device = torch.device(device)
        size = sum(tensor.nbytes for tensor in self.tensors if tensor.device != device)
        free = free_bytes(device) if self.resident and size else None
        if free is not None and size > RESIDENT_SHARE * free:
            self.resident = False
            reason = f"more than {RESIDENT_SHARE:.0%} of the {free / 1e9:.1f} GB that are free on {device}"
            log.info("data of %.1f GB stays in host memory, and is copied batch by batch: %s", size / 1e9, reason)
        if self.resident:
            self.tensors = tuple(tensor.to(device) for tensor in self.tensors)
        return self

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        return pick_batches(self.tensors, self.order, epoch, first)


class DatasetLoader(OrderedLoader):
    """Batches of a map-style data set that is read sample by sample, in worker processes if `num_workers` > 0.

    Torch's `DataLoader` reads the samples; a `SampleOrder` says which, and in what order. Reading starts exactly at the
    position set by `seek`, for any number of workers.

    Random augmentation is reproducible: before each sample is read, the generators of `random`, `numpy.random` and
    torch's CPU are seeded from (seed, epoch, sample number), and afterwards they are restored. The same goes for
    generators that the data set, its transforms or `collate_fn` hold, such as `numpy.random.default_rng()` in an
    attribute. A sample is therefore the same for any number of workers and ranks and after any resume, and reading it
    affects no other random numbers.

    Workers are forked from a process without threads, and get a pickled copy of the data set, see `WorkerProcess`. They
    keep it from epoch to epoch, and are restarted at the start of an epoch if the data set has changed, see `Snapshot`.
    If a worker is killed, its next batch raises an error, see `BatchReader`. Errors of the data set itself
    propagate, with a note that names the sample, the batch and the epoch.

    Args:
        dataset: has `len(dataset)` and `dataset[i]`. If it also has `read_batch(indices)`, that is called instead of
            `dataset[i]`: it returns a batch without drawing random numbers, and is faster.
        batch_size: samples in a global batch, all ranks together.
        shuffle: whether to draw a new order for each epoch.
        drop_last: whether to leave out an incomplete last batch.
        seed: seed of the order and of the augmentation, at least 0.
        num_workers: processes that read on each rank; 0 reads in this process. Logs a warning above the core count.
        collate_fn: makes a batch from a list of samples; None is torch's `default_collate`.
        transform: `transform(batch)` returns the batch to yield, without drawing random numbers; None yields the batch
            itself. It runs in the process that reads the batch; in training on a GPU it runs in the main process, on
            the batch on the GPU.
        rank: rank of this process; None means the environment's `RANK`, or 0.
        world_size: number of ranks; None means the environment's `WORLD_SIZE`, or 1.
        **loader_options: arguments of torch's `DataLoader`: `pin_memory`, `prefetch_factor`, ...
            `persistent_workers` is True by default, and `multiprocessing_context` 'forkserver'.

    Raises:
        TypeError: the data set is iterable-style, or an option would change the order.
        ValueError: `num_workers` is below 0, or `SampleOrder` or torch's `DataLoader` rejects an argument.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        drop_last: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Transform | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        **loader_options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise wrong_argument(
                "dataset", dataset, "must have a length and be indexed by sample: dataset[i]", TypeError
            )
        check_whole("num_workers", num_workers, 0, "a number of processes")
        clashing = {"sampler", "batch_sampler", "generator", "in_order"} & loader_options.keys()
        if clashing:
            raise TypeError(f"{', '.join(sorted(clashing))}: only shuffle and seed determine the order of samples")
        order = self._make_order(dataset, batch_size, shuffle, drop_last, seed, rank, world_size)
        super().__init__(order, transform)
        self.dataset = dataset
        self._keys = self._make_keys()
        if self.order.rank == 0:
            _warn_of_too_many(num_workers)
        batches = SeededBatches(dataset, collate_fn or default_collate, seed, transform)
        self._pool = WorkerPool(batches, self._keys, num_workers, loader_options)

    def _make_order(self, dataset: Any, *sizes: Any) -> SampleOrder:
        return SampleOrder(len(dataset), *sizes)

    def _make_keys(self) -> BatchKeys:
        return BatchKeys(self.order)

    def read(self, dataset: Any) -> None:
        """Read another data set from now on; its length must match the order's."""
        self.dataset = dataset
        self._pool.batches.dataset = dataset

    def __iter__(self) -> BatchReader:
        """Return an iterator over this rank's batches, from the position set by `seek` to the end of that epoch."""
        return self._pool.read(*self._take_position(), transforms=True)

    def untransformed(self) -> BatchReader:
        """Return the iterator that `iter()` would return, but without calling `transform`."""
        return self._pool.read(*self._take_position(), transforms=False)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        # Read in this process: the workers are busy with the current iteration.
        keys = BatchKeys(self.order)
        keys.start = epoch, first
        return (self._pool.batches[key] for key in keys)


@functools.cache  # once per process, for any number of loaders
def _warn_of_too_many(num_workers: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers > cores:
        log.warning("num_workers=%d, on %d cores: more processes than cores seldom read faster", num_workers, cores)
