"""Read batches of a Hugging Face data set in the order of its rows, without loading all of it first."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from runner.data.hf.columns import undecoded
from runner.data.hf.splits import Source, explained, is_saved, load_split
from runner.data.loaders import DatasetLoader
from runner.data.seeded_batches import SeededBatches
from runner.data.text.tokenizer import Tokenizer
from runner.data.workers import BatchKeys, WorkerPool
from runner.distributed.ranks import get_data_parallel_rank, get_data_parallel_size
from runner.failures.checks import check_whole, refuse_if
from runner.libraries.hugging_face import import_hf

log = logging.getLogger("runner")

READ_AHEAD = 100  # rows read ahead, to infer the types of the columns


class _Mark(Enum):
    """What a worker returns in place of a batch."""

    SKIPPED = 0
    END = 1


class Stream(NamedTuple):
    """The rows of a split; images are left encoded, as bytes."""

    rows: Any  # a `datasets.IterableDataset`
    first: Any  # its first rows, as a `datasets.Dataset`
    explain: Callable[[], AbstractContextManager[None]]  # explains errors that `datasets` raises while rows are read


def open_stream(source: Source, key: str, split: str) -> Stream:
    """Return the rows of a split; `key` is the argument that names it.

    Raises:
        OSError, ValueError: the split does not exist, has no rows or cannot be streamed, or its first rows are broken.
    """
    datasets = import_hf("datasets")
    reason = f"name={source.name!r} was written by save_to_disk and is read from disk in place; leave streaming out"
    refuse_if(is_saved(source.name), "streaming", True, reason)
    rows = load_split(source, key, split, streaming=True)
    with explained(source, key, split):
        if rows.features is None:
            rows = rows.cast(datasets.Dataset.from_list([*rows.take(READ_AHEAD)]).features)
        rows = undecoded(rows)
        first = datasets.Dataset.from_list([*rows.take(READ_AHEAD)], features=rows.features)
    refuse_if(not len(first), key, split, "has no rows")
    return Stream(rows, first, partial(explained, source, key, split))


def token_windows(rows: Iterable[Any], text: str, encoder: Tokenizer, context: int) -> Iterator[Tensor]:
    """Yield windows `(context + 1,)`, int32, of the joined texts of a column, as `cut_windows` does."""
    tokens = torch.empty(0, dtype=torch.int32)
    for encoded in encoder.encode_all((row[text], True) for row in rows if row[text] is not None):
        tokens = torch.cat([tokens, torch.from_numpy(encoded.astype("int32"))])
        if len(tokens) > context:
            windows = tokens.unfold(0, context + 1, context)
            yield from windows
            tokens = tokens[len(windows) * context :]


MakeSamples = Callable[[Iterable[Any]], Iterable[Any]]
"""`make_samples(rows)` returns samples, in the order of the rows."""


class StreamBatches(SeededBatches):
    """Reads the batches of one worker in sequence; see `StreamLoader` for the arguments."""

    def __init__(
        self, stream: Stream, shuffle_buffer: int, make_samples: MakeSamples, dataset: Any, size: int, *others: Any
    ) -> None:
        super().__init__(dataset, *others)
        self._stream = stream
        self._shuffle_buffer = shuffle_buffer
        self._make_samples = make_samples
        self._size = size
        self._process = get_data_parallel_rank(), get_data_parallel_size()
        self._numbered: Iterator[tuple[int, Any]] = iter(())
        self._ahead: list[tuple[int, Any]] = []

    def __getitem__(self, key: tuple[int, int, Any, bool]) -> Any:
        epoch, number, skips, transforms = key
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        if number < workers:  # the first batch of an epoch
            rows = self._stream.rows
            if self._shuffle_buffer:
                # Shuffling makes a new object. The original keeps its epoch in memory that all workers share, and
                # `set_epoch` adds the difference to it, which two workers may do at the same time.
                rows = rows.shuffle(self.seed, buffer_size=self._shuffle_buffer)
                rows.set_epoch(epoch)
            rank, ranks = self._process
            first = rank if worker is None else worker.id * ranks + rank
            numbers = itertools.count(first, workers * ranks)  # row numbers, for one file that is not shuffled
            self._numbered = zip(numbers, self._make_samples(self._read_rows(rows)), strict=False)
            self._ahead = self._take()
        samples, self._ahead = self._ahead, self._take()
        if not samples:
            return _Mark.END
        if skips and self._ahead:  # a worker's last batch is never skipped, because it may be the rank's last
            return _Mark.SKIPPED
        current = getattr(self.dataset, "rows", self.dataset)
        current.clear()
        current.update(samples)
        try:
            return super().__getitem__((epoch, number, [*current], transforms))
        except Exception as error:
            error.add_note("rows are counted in the order in which they are read")
            raise

    def _read_rows(self, rows: Iterable[Any]) -> Iterator[Any]:
        with self._stream.explain():
            yield from rows

    def _take(self) -> list[tuple[int, Any]]:
        return [*itertools.islice(self._numbered, self._size)]


class StreamKeys(BatchKeys):
    """The sampler: yields a key for each batch of an epoch, from the first on, until `is_over`."""

    def __init__(self) -> None:
        self.start = (0, 0)
        self.transforms = False
        self.skipped = 0  # batches that need not be read
        self.is_over = False
        self._count = 0

    def __len__(self) -> int:
        """Return the number of keys, which is known only when the stream is over; before, the largest int."""
        return self._count if self.is_over else sys.maxsize

    def __iter__(self) -> Iterator[tuple[int, int, Any, bool]]:
        for number in itertools.count():
            if self.is_over:
                return
            self._count = number + 1
            yield self.start[0], number, number < self.skipped, self.transforms


class StreamLoader:
    """Batches of a stream whose number of rows is unknown, read as they come.

    Files are divided among ranks if their number is a multiple of the number of ranks; otherwise each of n ranks reads
    all files and uses every n-th row. The files of a rank are divided among its workers. Each row is used once in an
    epoch; ranks may have different numbers of batches, see `runner.data.Sharded`. The order is a function of the seed,
    the epoch, and the numbers of ranks and workers.

    To begin in the middle of an epoch, the loader reads its rows again from the start, without making batches of them.

    Args:
        stream: the rows.
        make_samples: makes samples from rows, such as windows from texts.
        dataset: a data set with an attribute `rows`, a dict that is filled with the samples of each batch by number; or
            such a dict itself.
        collate_fn: makes a batch from a list of samples.
        batch_size: samples in a global batch, all ranks together; a multiple of the number of ranks.
        shuffle_buffer: number of rows in each worker's buffer, from which the next row is drawn at random; the order of
            files is shuffled too. 0 reads rows in order.
        seed: seed of the order and of random numbers in samples.
        num_workers: maximum number of processes that read on each rank; each needs a file.
        transform: `transform(batch)` returns the batch to yield; see `DatasetLoader`.

    Attributes:
        normalization: see `OrderedLoader`.
        order_settings: the settings that decide which rows a batch has.
        last: this rank's last batch, if an iteration was to begin after it.

    Raises:
        ValueError: an argument is out of range.
    """

    ranks_read = "shares"

    def __init__(
        self,
        stream: Stream,
        make_samples: MakeSamples,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        batch_size: int,
        shuffle_buffer: int,
        seed: int,
        num_workers: int,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        check_whole("num_workers", num_workers, 0, "a number of processes")
        check_whole("seed", seed, 0)
        rank, ranks = get_data_parallel_rank(), get_data_parallel_size()
        rows = stream.rows
        reason = f"must be a multiple of the {ranks} ranks, which each read their own rows with streaming=True"
        refuse_if(batch_size % ranks != 0, "batch_size", batch_size, reason)
        self.order_settings = {"ranks": ranks, "files": rows.num_shards, "batch_size": batch_size, "seed": seed}
        self.order_settings["shuffle"] = f"streamed with shuffle_buffer={shuffle_buffer}"
        if ranks > 1:
            rows = import_hf("datasets.distributed").split_dataset_by_node(rows, rank, ranks)
        workers = self.order_settings["num_workers"] = min(num_workers, rows.num_shards)
        if workers < num_workers and rank == 0:
            log.info("num_workers=%d: only %d used, as each needs a file to read", num_workers, workers)
        self.dataset = dataset
        self.transform = transform
        self.normalization = getattr(transform, "normalization", None)
        self.last: Any = None
        self._next = (0, 0)
        self._workers = max(1, workers)
        stream = stream._replace(rows=rows)
        size = batch_size // ranks
        batches = StreamBatches(stream, shuffle_buffer, make_samples, dataset, size, collate_fn, seed, transform)
        self._pool = WorkerPool(batches, StreamKeys(), workers, {})

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Make the next `iter()` start at a batch of an epoch."""
        self._next = (epoch, batch)

    def in_memory(self, rows: Any) -> DatasetLoader:
        """Return a loader of the samples of a data set, in their order, with batches like those of this loader."""
        size, seed = self.order_settings["batch_size"], self.order_settings["seed"]
        return DatasetLoader(rows, size, shuffle=False, seed=seed, collate_fn=rows.stack, transform=self.transform)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches, from the position set by `seek` to the end of that epoch."""
        return self._read(transforms=True)

    def untransformed(self) -> Iterator[Any]:
        """Return the iterator that `iter()` would return, but without calling `transform`."""
        return self._read(transforms=False)

    def _read(self, transforms: bool) -> Iterator[Any]:
        epoch, first = self._next
        self._next = (epoch + 1, 0)
        return self._batches(epoch, first, transforms)

    def _batches(self, epoch: int, first: int, transforms: bool) -> Iterator[Any]:
        reader = self._pool.read(epoch, 0, transforms)
        keys: Any = reader.keys
        keys.skipped = first
        keys.is_over = False
        self.last = None
        count = ends = 0
        for batch in reader:
            ends = ends + 1 if batch is _Mark.END else 0
            keys.is_over = ends >= self._workers  # workers take turns, so all of them have ended
            count += not ends
            if count > first and not ends:  # skipped batches are counted too
                yield batch
            elif not isinstance(batch, _Mark):
                self.last = batch
