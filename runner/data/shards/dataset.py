"""A data set in shards with fast random access, and its loader, which prefetches the next shards."""

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
from runner.data.shards.files import ShardFile, in_parallel, retried
from runner.data.shards.formats import Description, Format, OpenShard, is_description
from runner.data.shards.order import BlockOrder
from runner.data.workers import BatchKeys
from runner.failures.errors import WrongArgument, wrong_argument
from runner.files.addresses import without_credentials
from runner.files.printable import printable
from runner.files.whole import read_object, write_whole

log = logging.getLogger("runner")

VERSION = 1  # of the files in the cache
FETCHERS = 4  # threads that fetch ahead
MARKED_EVERY = 5.0  # seconds, that a shard in use is marked as such


class ShardedDataset(Dataset[Any]):
    """The rows of shards, one shard after another, as samples.

    The number of rows of each shard is known from the start, and kept in the cache. Shards are fetched when one of
    their rows is first read.

    Args:
        files: the shards, at least one.
        form: format of the shards.
        cache: cache for shards that are not read in place.
        mixed: how many are read at a time, at least 1.
        decode: makes a sample of a row, as `OpenShard.read` returns it in a list.
        columns: columns that every shard must have, of the same type.
        key: the argument that named the files, for messages.

    Attributes:
        sizes: rows of each shard.
        mixed: as given.

    Raises:
        ConnectionError: a server fails in every attempt.
        ValueError: a shard is torn, empty, or unlike the others, or the cache cannot hold those read at a time.
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
        self._about: list[Description] = in_parallel(self._describe, range(len(files)))
        self._check_columns(columns)
        self._check_room()
        self.sizes = [one["rows"] for one in self._about]
        self._ends = numpy.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        ((shard, rows),) = self._shards_of(numpy.array([index]))
        with _naming(self._files[shard], self._key):
            return self.decode(self._read(shard, rows)[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": OrderedDict()}  # open files stay in this process

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the first shard, and their types."""
        return self._about[0]["columns"]

    def fetch(self, shard: int, keep: Collection[int] = ()) -> Path | None:
        """Return the path of a shard's file in the cache, fetched first if need be; None if it is read in place.

        Args:
            shard: number of the shard.
            keep: numbers of shards that must not make room for it.

        Raises:
            ConnectionError: the server fails in every attempt.
            ValueError: the shard has changed, is torn, or does not fit into the cache.
        """
        file = self._files[shard]
        name = self._names[shard]
        about = self._about[shard] if hasattr(self, "_about") else {"bytes": file.size, "in_place": False}
        if file.is_local and about["in_place"]:
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

        size = about["bytes"] + (file.size if self._form.is_prepared and not file.is_local else 0)
        with _naming(file, self._key):
            return self._cache.get(name, size, make, [self._names[one] for one in keep], file.shown)

    def _describe(self, shard: int) -> Description:
        file = self._files[shard]
        form = self._form
        kept = self._cache.folder / f"{self._names[shard]}.json"
        if is_description(found := read_object(kept), form):
            with suppress(OSError):  # it belongs to another user, or was removed a moment ago
                os.utime(kept)  # the cache removes those that nobody uses
            return found
        with _naming(file, self._key):
            if file.is_local:
                found = form.describe(Path(file.address), file.address, file.size)
            elif file.address.endswith(form.described_by_a_part):
                found = retried(file.address, lambda: self._describe_part(file))
            else:
                found = form.describe(self.fetch(shard), file.address, file.size)
            if not found["rows"]:
                raise ValueError("it contains no samples; leave it out")
        write_whole(kept, json.dumps(found))
        return found

    def _describe_part(self, file: ShardFile) -> Description:
        with file.open() as opened:
            return self._form.describe(opened, file.address, file.size)

    def _check_columns(self, columns: Sequence[str]) -> None:
        first = self.columns
        for file, about in zip(self._files, self._about, strict=True):
            for column in columns:
                found = about["columns"].get(column)
                if found is None or found != first[column]:
                    what = f"has no column {column!r}, only {', '.join(map(printable, about['columns']))}"
                    if found is not None:
                        what = f"has {found} in column {column!r}, where {self._files[0].shown} has {first[column]}"
                    raise wrong_argument(self._key, without_credentials(file.address), what)

    def _check_room(self) -> None:
        pairs = zip(self._files, self._about, strict=True)
        sizes = sorted(0 if file.is_local and one["in_place"] else one["bytes"] for file, one in pairs)
        needed = sum(sizes[-self.mixed :])
        if needed > self._cache.limit:
            reason = (
                f"must hold the shards that are read at a time; the largest {min(self.mixed, len(sizes))} take "
                f"{needed / 1e9:.3g} GB; raise it, or lower shuffle_shards={self.mixed}"
            )
            raise wrong_argument("cache_gb", self._cache.limit / 1e9, reason)

    def _check_content(self, raw: Path, name: str, file: ShardFile) -> None:
        """Raise ValueError if a file that is fetched again has different content, unnoticed by its server."""
        with raw.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        kept = self._cache.folder / f"{name}.sha256"
        known = kept.read_text(errors="replace") if kept.exists() else ""
        if known != digest and re.fullmatch("[0-9a-f]{64}", known):
            raise ValueError("its content is not what it was, although its size is; put it back, or start again")
        write_whole(kept, digest)

    def _shards_of(self, indices: Any) -> Iterator[tuple[int, list[int]]]:
        """Yield the shards that hold some samples, given in ascending order, and the rows of each."""
        shards = numpy.searchsorted(self._ends, indices, "right")
        for shard in numpy.unique(shards):
            yield int(shard), (indices[shards == shard] - (self._ends[shard] - self.sizes[shard])).tolist()

    def _read(self, shard: int, rows: Sequence[int]) -> Any:
        with _naming(self._files[shard], self._key):
            return self._open(shard).read(rows)

    def _open(self, shard: int) -> OpenShard:
        file = self._files[shard]
        about = self._about[shard]
        in_place = file.is_local and about["in_place"]
        if in_place:
            file.check()
        opened, marked = self._opened.pop(shard, (None, 0.0))
        if opened is None:
            opened = self._form.open(Path(file.address), about) if in_place else self._open_fetched(shard)
            while len(self._opened) >= 2 * self.mixed:
                self._opened.popitem(last=False)
        if not in_place and (now := time.monotonic()) - marked > MARKED_EVERY:
            self._cache.has(self._names[shard])
            marked = now
        self._opened[shard] = opened, marked
        return opened

    def _open_fetched(self, shard: int) -> OpenShard:
        for last in (False, False, True):
            path = self.fetch(shard)
            assert path is not None
            try:
                return self._form.open(path, self._about[shard])
            except FileNotFoundError:  # it made room for another one a moment ago
                if last:
                    raise
            except ValueError:
                if last:
                    raise
                log.warning("%s: what the cache holds of it is damaged; fetching it again", self._files[shard].shown)
                self._cache.discard(self._names[shard])
        raise AssertionError


class BatchedShards(ShardedDataset):
    """A `ShardedDataset` that is read batch by batch.

    Args:
        *args: see `ShardedDataset`, like the arguments not listed here.
        join: makes one of what `OpenShard.read` returned for several shards.
        decode: makes tensors `(n, ...)`, one or a tuple, of that.
        **kwargs: see `ShardedDataset`.
    """

    def __init__(
        self, *args: Any, join: Callable[[list[Any]], Any], decode: Callable[[Any], Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, decode=decode or _as_it_is, **kwargs)
        self._join = join

    def __getitem__(self, index: int) -> Any:
        return _map(self.read_batch([index]), lambda one: one[0])

    def read_batch(self, indices: Sequence[int]) -> Any:
        """Return samples as one batch, in the order of `indices`."""
        ordered, places = torch.tensor(indices).sort()
        parts = [self._read(shard, rows) for shard, rows in self._shards_of(ordered.numpy())]
        try:
            batch = self.decode(self._join(parts))
        except ValueError:
            self._refuse_row(ordered.numpy())
            raise
        if bool((places[1:] > places[:-1]).all()):
            return batch
        return _map(batch, lambda one: one[places.argsort()])

    def _refuse_row(self, indices: Any) -> None:
        """Raise ValueError for the first sample, of those given in ascending order, that cannot be decoded."""
        for shard, rows in self._shards_of(indices):
            for row in rows:
                with _naming(self._files[shard], self._key):
                    try:
                        self.decode(self._join([self._read(shard, [row])]))
                    except ValueError as error:
                        raise ValueError(f"row {row}: {error}") from error


class ShardLoader(DatasetLoader):
    """Batches of a `ShardedDataset`, in a `BlockOrder` of its shards.

    While batches of a group of shards are read, threads of this process fetch those of the next group, as far as the
    cache has room for both. For the arguments see `DatasetLoader`.
    """

    dataset: ShardedDataset

    def _make_order(self, dataset: ShardedDataset, *sizes: Any) -> SampleOrder:
        return BlockOrder(dataset.sizes, dataset.mixed, *sizes)

    def _make_keys(self) -> BatchKeys:
        return _FollowedKeys(self.order, self.dataset)


class _FollowedKeys(BatchKeys):
    """Keys that have shards fetched before the batches are read that need them."""

    def __init__(self, order: SampleOrder, dataset: ShardedDataset) -> None:
        super().__init__(order)
        self._dataset = dataset
        self._wanted: deque[tuple[int, list[int]]] = deque()
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
        self._wanted.clear()
        self._wanted.extend((one, shards) for one in shards)
        self._threads = [one for one in self._threads if one.is_alive()]
        for _ in range(FETCHERS - len(self._threads)):
            thread = threading.Thread(target=self._run, name="fetch-shards", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while self._wanted:
            try:
                shard, keep = self._wanted.popleft()
                self._dataset.fetch(shard, keep)
            except IndexError:  # another thread took the last one
                return
            except Exception as error:  # the reader of the shard fetches it again, and raises the error if it persists
                log.debug("not fetched ahead: %s", error)


class _naming:
    """A context that says in a ValueError which file it is about."""

    def __init__(self, file: ShardFile, key: str) -> None:
        self._file = file
        self._key = key

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if type(error) in (ValueError, WrongArgument) and self._file.shown not in str(error):
            raise wrong_argument(self._key, without_credentials(self._file.address), str(error)) from error


def _name(file: ShardFile, form: Format) -> str:
    """Return the cache name of a prepared file; it depends on everything that determines the content."""
    content = json.dumps([VERSION, *file, type(form).__name__, form.identity])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _as_it_is(rows: Any) -> Any:
    return rows


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(batch) if isinstance(batch, Tensor) else tuple(map(change, batch))
