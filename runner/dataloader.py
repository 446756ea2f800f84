"""One view of any dataloader: started at any batch of any epoch, on the device, with the counts of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from runner.batch import count_samples, to_device
from runner.distributed.collectives import get_world_size
from runner.model import Model
from runner.precision import Precision
from runner.randomness import ForwardStream, stream_seed


class BatchStream:
    """Reads a dataloader.

    A loader of this project has `order` (a `SampleOrder`) and `seek`: it starts at any batch without reading those
    before it, and knows how many samples each rank has. Anything else that yields batches works too: its sampler's
    `set_epoch` is called, batches before the start are read and dropped, and with many ranks it must shard itself
    (`DistributedSampler`), into shares of equal size. What it, or the transform of a loader of this project, draws from
    torch's generators while a batch is read depends on the seed, the epoch and the batch alone; but not in persistent
    workers of a plain DataLoader, which keep generators of their own from one epoch to the next.

    Args:
        loader: yields this rank's batches.
        device: where batches are wanted.
        precision: what floating tensors are cast to.
        num_samples: counts the samples of a batch; the default, `Model.num_samples`, must be sure of the first one.
        label: 'train', an evaluator's label, or 'predict'.
        name: what the user calls it, for messages.
        seed: of what is drawn while batches are read, equal on all ranks, as samplers may need it to be.

    Raises:
        TypeError: it cannot be iterated.
        ValueError: it is empty, or it would give every rank the same samples.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        precision: Precision,
        num_samples: Callable[[Any], int],
        label: str,
        name: str,
        seed: int = 0,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"{name}={loader!r}: must be iterable, yielding batches")
        refuse_unsharded(loader, name, get_world_size())
        try:
            self.length: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.length = None
        if self.length == 0:
            raise ValueError(f"{name} has no batches: its data set is empty, or, with drop_last=True, smaller than one")
        self.loader = loader
        self.label = label
        self.name = name
        self._device = device
        self._started = False
        self._num_samples = num_samples
        self._world_size = get_world_size()
        order = getattr(loader, "order", None)
        is_default = getattr(num_samples, "__func__", None) is Model.num_samples
        own = self._count_first if is_default else self._count
        self.counts: Callable[[int, Any], tuple[int, int]] = own if order is None else order.counts
        """Returns how many samples of a batch this rank has, and how many all ranks have, given the batch's index in
        its epoch and the batch, which stands in for an empty share where this rank has 0 samples."""
        self._cast = precision.cast if precision.weight_dtype is not None else None
        self._seed = seed
        self._draws = order is None or getattr(loader, "transform", None) is not None
        self._resident = hasattr(loader, "to")
        if self._resident:
            loader.to(device)  # type: ignore[attr-defined]

    def start(self, epoch: int = 0, batch: int = 0) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch from a given one on, on the device."""
        loader: Any = self.loader
        read = 0
        if hasattr(loader, "seek"):
            loader.seek(epoch, batch)
            read = batch
        elif hasattr(loader, "__next__") and self._started:
            read = batch  # an iterator stands where it was left
        else:
            candidates = [_sampler(loader), getattr(loader, "batch_sampler", None), loader]
            shuffles = next((one for one in candidates if hasattr(one, "set_epoch")), None)
            if shuffles is not None:
                shuffles.set_epoch(epoch)
        self._started = True
        batches = self._read(epoch, read) if self._draws else iter(loader)
        batches = itertools.islice(batches, batch - read, None)
        if not self._resident:
            batches = (to_device(one, self._device) for one in batches)
        return batches if self._cast is None else map(self._cast, batches)

    def _read(self, epoch: int, batch: int) -> Iterator[Any]:
        """Yield batches from a given one on, each read with torch's generators seeded for it."""
        for one in (self.loader, _sampler(self.loader)):
            if isinstance(generator := getattr(one, "generator", None), torch.Generator):
                generator.manual_seed(stream_seed(self._seed, "order", epoch))
        stream = ForwardStream(self._seed, self._device, "dataloader", epoch)
        stream.start(0, 0)
        batches = iter(self.loader)
        for number in itertools.count(batch):
            stream.start(number, 0)
            try:
                yield next(batches)
            except StopIteration:
                return

    def _count_first(self, index: int, batch: Any) -> tuple[int, int]:
        count_samples(batch, strict=True)
        self.counts = self._count  # later batches are read alike, also where one happens to fit another reading
        return self._count(index, batch)

    def _count(self, index: int, batch: Any) -> tuple[int, int]:
        samples = self._num_samples(batch)
        return samples, samples * self._world_size


def _sampler(loader: Any) -> Any:
    """Return what says which samples a torch DataLoader reads, None where that is not known."""
    # With a batch_sampler, torch makes up a loader.sampler that nobody asks.
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader if batch_sampler is None else batch_sampler, "sampler", None)


def refuse_unsharded(loader: Any, name: str, world_size: int) -> None:
    """Raise where a plain torch DataLoader would give all ranks the same samples, or pad an evaluation with copies."""
    if hasattr(loader, "order") or world_size == 1 or not isinstance(loader, torch.utils.data.DataLoader):
        return
    remedy = "use runner.data.DatasetLoader(dataset, batch_size=<samples over all ranks>), which shards exactly"
    sampler = _sampler(loader)
    if isinstance(sampler, torch.utils.data.RandomSampler | torch.utils.data.SequentialSampler):
        raise ValueError(
            f"{name}: a DataLoader without a sharding sampler gives {world_size} ranks the same samples; {remedy}"
        )
    if name != "train_dataloader" and isinstance(sampler, torch.utils.data.DistributedSampler):
        size = len(sampler.dataset)  # type: ignore[arg-type]
        if size % world_size:
            raise ValueError(
                f"{name}: DistributedSampler repeats samples, as {size} are no multiple of {world_size} ranks; {remedy}"
            )
