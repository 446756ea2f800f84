"""A data set in shards with fast random access, and its loader, which prefetches shards."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.loaders import DatasetLoader
from runner.data.order import SampleOrder
from runner.data.shards.cache import ShardCache
from runner.data.shards.files import ShardFile, in_parallel, with_retries
from runner.data.shards.formats import Description, Format, OpenShard, is_description
from runner.data.shards.order import BlockOrder
from runner.data.workers import BatchKeys
from runner.failures.errors import WrongArgument, wrong_argument
from runner.files.addresses import without_credentials
from runner.files.printable import printable
from runner.files.whole import read_object, write_atomically

log = logging.getLogger("runner")

VERSION = 1  # of the files in the cache
FETCHERS = 4  # threads that prefetch
MARKED_EVERY = 5.0  # seconds after which a shard in use is marked as used again


class ShardedDataset(Dataset[Any]):
    """The rows of all shards, in the order of the shards, as samples.

    The number of rows of each shard is read at the start and kept in the cache. A shard is fetched when one of its rows
    is first read.

    Args:
        files: the shards, at least one.
        form: format of the shards.
        cache: cache for shards that are not read in place.
        mixed: number of shards that are read at a time, at least 1.
        decode: makes a sample of one element of the list that `OpenShard.read` returns.
        columns: columns that every shard must have, with the same types.
        key: name of the argument that gave the files, for messages.

    Attributes:
        sizes: number of rows of each shard.
        mixed: the argument.

    Raises:
        ConnectionError: a server fails in every attempt.
        ValueError: a shard is torn, empty, or unlike the others, or `mixed` shards do not fit in the cache.
    """

    def __init__(
        self,
        files: Sequence[ShardFile],
        form: Format,
        cache: ShardCache,
        mixed: int,
        decode: Callable[[Any], Any],
        columns: Sequence[str],
        key: str = "path",
    ) -> None:
        self.mixed = mixed
        self.decode = decode
        self._files = files
        self._form = form
        self._cache = cache
        self._key = key
        self._names = [_name(file, form) for file in files]
        self._opened: OrderedDict[int, tuple[OpenShard, float]] = OrderedDict()
        self._descriptions: list[Description] = in_parallel(self._describe, range(len(files)))
        self._check_columns(columns)
        self._check_room()
        self.sizes = [description["rows"] for description in self._descriptions]
        self._ends = numpy.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        ((shard, rows),) = self._locate(numpy.array([index]))
        with _ErrorsNaming(self._files[shard], self._key):
            return self.decode(self._read(shard, rows)[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": OrderedDict()}  # open files stay in this process

    @property
    def columns(self) -> dict[str, str]:
        """The types of the first shard's columns, by name."""
        return self._descriptions[0]["columns"]

    def fetch(self, shard: int, keep: Collection[int] = ()) -> Path | None:
        """Return the path of a shard in the cache, after fetching it if needed; None if it is read in place.

        Args:
            shard: number of the shard.
            keep: numbers of shards that must not be evicted for it.

        Raises:
            ConnectionError: the server fails in every attempt.
            ValueError: the shard has changed, is torn, or does not fit in the cache.
        """
        file = self._files[shard]
        name = self._names[shard]
        is_described = hasattr(self, "_descriptions")  # not while a description is made of the whole file
        description = self._descriptions[shard] if is_described else {"bytes": file.size, "in_place": False}
        if file.is_local and description["in_place"]:
            return None

        def make(target: Path, grow: Callable[[int], None]) -> None:
            raw = Path(f"{target}.raw") if self._form.is_prepared else target
            if file.is_local:
                raw = Path(file.address)
                file.check()
            else:
                file.download(raw)
                self._check_content(raw, name, file)
            if self._form.is_prepared:
                self._form.prepare(raw, target, grow)

        size = description["bytes"] + (file.size if self._form.is_prepared and not file.is_local else 0)
        with _ErrorsNaming(file, self._key):
            return self._cache.get(name, size, make, [self._names[number] for number in keep], file.shown)

    def _describe(self, shard: int) -> Description:
        file = self._files[shard]
        form = self._form
        kept = self._cache.folder / f"{self._names[shard]}.json"
        if is_description(description := read_object(kept), form):
            with suppress(OSError):  # it belongs to another user, or has just been removed
                os.utime(kept)  # the cache removes files that are not used
            return description
        with _ErrorsNaming(file, self._key):
            if file.is_local:
                description = form.describe(Path(file.address), file.address, file.size)
            elif file.address.endswith(form.described_by_a_part):
                description = with_retries(file.address, lambda: self._describe_part(file))
            else:
                description = form.describe(self.fetch(shard), file.address, file.size)
            if not description["rows"]:
                raise ValueError("it contains no samples; leave it out")
        write_atomically(kept, json.dumps(description))
        return description

    def _describe_part(self, file: ShardFile) -> Description:
        with file.open() as opened:
            return self._form.describe(opened, file.address, file.size)

    def _check_columns(self, columns: Sequence[str]) -> None:
        first = self.columns
        for file, description in zip(self._files, self._descriptions, strict=True):
            for column in columns:
                kind = description["columns"].get(column)
                if kind is None or kind != first[column]:
                    reason = f"has no column {column!r}, only {', '.join(map(printable, description['columns']))}"
                    if kind is not None:
                        reason = f"has {kind} in column {column!r}, where {self._files[0].shown} has {first[column]}"
                    raise wrong_argument(self._key, without_credentials(file.address), reason)

    def _check_room(self) -> None:
        pairs = zip(self._files, self._descriptions, strict=True)
        sizes = sorted(0 if file.is_local and shard["in_place"] else shard["bytes"] for file, shard in pairs)
        needed = sum(sizes[-self.mixed :])
        if needed > self._cache.limit:
            reason = (
                f"must hold the shards that are read at a time; the largest {min(self.mixed, len(sizes))} take "
                f"{needed / 1e9:.3g} GB; raise it, or lower shuffle_shards={self.mixed}"
            )
            raise wrong_argument("cache_gb", self._cache.limit / 1e9, reason)

    def _check_content(self, raw: Path, name: str, file: ShardFile) -> None:
        """Raise ValueError if a file fetched again has other content, although its size and tag are the same."""
        with raw.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        kept = self._cache.folder / f"{name}.sha256"
        known = kept.read_text(errors="replace") if kept.exists() else ""
        if known != digest and re.fullmatch("[0-9a-f]{64}", known):
            raise ValueError("its content has changed, although its size has not; restore it, or start a new run")
        write_atomically(kept, digest)

    def _locate(self, indices: Any) -> Iterator[tuple[int, list[int]]]:
        """Yield (shard, rows) for the shards that hold the samples; `indices` are ascending."""
        shards = numpy.searchsorted(self._ends, indices, "right")
        for shard in numpy.unique(shards):
            yield int(shard), (indices[shards == shard] - (self._ends[shard] - self.sizes[shard])).tolist()

    def _read(self, shard: int, rows: Sequence[int]) -> Any:
        with _ErrorsNaming(self._files[shard], self._key):
            return self._open(shard).read(rows)

    def _open(self, shard: int) -> OpenShard:
        file = self._files[shard]
        description = self._descriptions[shard]
        in_place = file.is_local and description["in_place"]
        if in_place:
            file.check()
        opened, marked = self._opened.pop(shard, (None, 0.0))
        if opened is None:
            opened = self._form.open(Path(file.address), description) if in_place else self._open_fetched(shard)
            while len(self._opened) >= 2 * self.mixed:
                self._opened.popitem(last=False)
        if not in_place and (now := time.monotonic()) - marked > MARKED_EVERY:
            self._cache.has(self._names[shard])
            marked = now
        self._opened[shard] = opened, marked
        return opened

    def _open_fetched(self, shard: int) -> OpenShard:
        for is_last in (False, False, True):
            path = self.fetch(shard)
            assert path is not None
            try:
                return self._form.open(path, self._descriptions[shard])
            except FileNotFoundError:  # it has just been evicted for another shard
                if is_last:
                    raise
            except ValueError:
                if is_last:
                    raise
                log.warning("%s: what the cache holds of it is damaged; fetching it again", self._files[shard].shown)
                self._cache.discard(self._names[shard])
        raise AssertionError


class BatchedShards(ShardedDataset):
    """A `ShardedDataset` that is read batch by batch.

    Args:
        *args: see `ShardedDataset`, like the arguments not listed here.
        join: joins the results of `OpenShard.read` for several shards.
        decode: makes tensors `(n, ...)`, one or a tuple, of the joined rows; None leaves these as they are.
        **kwargs: see `ShardedDataset`.
    """

    def __init__(
        self, *args: Any, join: Callable[[list[Any]], Any], decode: Callable[[Any], Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, decode=decode or _return_unchanged, **kwargs)
        self._join = join

    def __getitem__(self, index: int) -> Any:
        return _map(self.read_batch([index]), lambda tensor: tensor[0])

    def read_batch(self, indices: Sequence[int]) -> Any:
        """Return samples as one batch, in the order of `indices`."""
        ordered, positions = torch.tensor(indices).sort()
        parts = [self._read(shard, rows) for shard, rows in self._locate(ordered.numpy())]
        try:
            batch = self.decode(self._join(parts))
        except ValueError:
            self._refuse_row(ordered.numpy())
            raise
        if bool((positions[1:] > positions[:-1]).all()):
            return batch
        return _map(batch, lambda tensor: tensor[positions.argsort()])

    def _refuse_row(self, indices: Any) -> None:
        """Raise ValueError for the first of the samples that cannot be decoded; `indices` are ascending."""
        for shard, rows in self._locate(indices):
            for row in rows:
                with _ErrorsNaming(self._files[shard], self._key):
                    try:
                        self.decode(self._join([self._read(shard, [row])]))
                    except ValueError as error:
                        raise ValueError(f"row {row}: {error}") from error


class ShardLoader(DatasetLoader):
    """Batches of a `ShardedDataset`, in a `BlockOrder` of its shards.

    While batches of one group of shards are read, threads of this process prefetch the next group, as far as the cache
    has room for both. For the arguments see `DatasetLoader`.
    """

    dataset: ShardedDataset

    def _make_order(self, dataset: ShardedDataset, *sizes: Any) -> SampleOrder:
        return BlockOrder(dataset.sizes, dataset.mixed, *sizes)

    def _make_keys(self) -> BatchKeys:
        return _PrefetchingKeys(self.order, self.dataset)


class _PrefetchingKeys(BatchKeys):
    """Keys that also prefetch the shards of the batches to come."""

    def __init__(self, order: SampleOrder, dataset: ShardedDataset) -> None:
        super().__init__(order)
        self._dataset = dataset
        self._queue: deque[tuple[int, list[int]]] = deque()
        self._threads: list[threading.Thread] = []

    def __iter__(self) -> Iterator[tuple[int, int, list[int], bool]]:
        due = -1
        for key in super().__iter__():
            epoch, batch = key[:2]
            if batch >= due and isinstance(self.order, BlockOrder):
                now, following, due = self.order.upcoming(epoch, batch)
                self._fetch([*now, *following])
            yield key

    def _fetch(self, shards: list[int]) -> None:
        self._queue.clear()
        self._queue.extend((shard, shards) for shard in shards)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(FETCHERS - len(self._threads)):
            thread = threading.Thread(target=self._run, name="fetch-shards", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while self._queue:
            try:
                shard, keep = self._queue.popleft()
                self._dataset.fetch(shard, keep)
            except IndexError:  # another thread took the last shard
                return
            except Exception as error:  # the reader of the shard fetches it again, and raises the error if it persists
                log.debug("not fetched ahead: %s", error)


class _ErrorsNaming:
    """A context that adds the file to a ValueError that does not name it."""

    def __init__(self, file: ShardFile, key: str) -> None:
        self._file = file
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if type(error) in (ValueError, WrongArgument) and self._file.shown not in str(error):
            raise wrong_argument(self._key, without_credentials(self._file.address), str(error)) from error


def _name(file: ShardFile, form: Format) -> str:
    """Return the name of a prepared file in the cache, a digest of everything that determines its content."""
    content = json.dumps([VERSION, *file, type(form).__name__, form.identity])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _return_unchanged(rows: Any) -> Any:
    return rows


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(batch) if isinstance(batch, Tensor) else tuple(map(change, batch))
