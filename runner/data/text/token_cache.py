"""Keep tokens on disk, so that texts are tokenized once, and map them into memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.files.lock import PATIENCE, exclusive_lock, size_of
from runner.files.whole import sync_file

log = logging.getLogger("runner")

FORMAT = 1  # version of the files and of their names
REPORT_INTERVAL = 30.0  # seconds between messages while texts are tokenized
STORED = {
    "uint8": torch.uint8,
    "uint16": torch.int16,
    "int32": torch.int32,
}  # torch has no uint16 for most operations: int16 has the same bits


class TokenCache:
    """A folder of tokens that any number of processes share: one process tokenizes while the others wait.

    A file is written under a temporary name and renamed once it is complete. If that fails, because the disk is full,
    the folder is not writable, or the process that tokenizes makes no progress, a warning is logged and the tokens are
    kept in memory.

    Args:
        folder: the folder, created if it does not exist; `~` is the home folder; None keeps the tokens in the memory of
            each process.
        patience: seconds to wait for another process that makes no progress.
    """

    def __init__(self, folder: str | None, patience: float = PATIENCE) -> None:
        self.patience = patience
        self.folder = None if folder is None else Path(folder).expanduser().absolute()

    def tokens(self, key: Any, dtype: numpy.dtype[Any], make: Callable[[], Iterator[NDArray[Any]]]) -> Tensor:
        """Return tokens `(n,)` on the CPU, from the folder or else made: uint8, int16 for uint16, or int32.

        Args:
            key: everything that the tokens depend on, as JSON values.
            dtype: uint8, uint16 or int32.
            make: yields the tokens in parts `(n_i,)` of that type.
        """
        path = self.path(key, dtype)
        if path is None:
            return _join([*_log_progress(make())], dtype)
        partial = f"{path.stem}.*.partial"
        with ExitStack() as stack:
            try:
                if path.is_file():
                    return map_tokens(path, dtype)
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = exclusive_lock(
                    path.with_suffix(".lock"), "tokenizes", lambda: size_of(path.parent, partial), self.patience
                )
                is_alone = stack.enter_context(lock)
            except (OSError, RuntimeError) as error:  # torch raises RuntimeError for an unreadable file
                return self._in_memory(make, dtype, error)
            if not path.is_file():
                if is_alone:
                    for leftover in path.parent.glob(partial):  # of killed processes
                        leftover.unlink(missing_ok=True)
                return self._write(path, dtype, make)
        return map_tokens(path, dtype)

    def size(self, key: Any, dtype: numpy.dtype[Any]) -> int | None:
        """Return the number of tokens in the folder; None if it lacks them. For the arguments see `tokens`."""
        path = self.path(key, dtype)
        try:
            return path.stat().st_size // dtype.itemsize if path is not None and path.is_file() else None
        except OSError:  # the folder is not readable
            return None

    def path(self, key: Any, dtype: numpy.dtype[Any]) -> Path | None:
        """Return the path of a file of tokens, which need not exist; None without a folder."""
        name = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()[:32]
        return None if self.folder is None else self.folder / f"{name}.{dtype.name}"

    def _write(self, path: Path, dtype: numpy.dtype[Any], make: Callable[[], Iterator[NDArray[Any]]]) -> Tensor:
        try:
            handle, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".partial", dir=path.parent)
        except OSError as error:
            return self._in_memory(make, dtype, error)
        try:
            with open(handle, "r+b", buffering=0) as file:
                parts = _log_progress(make())
                written = 0
                for part in parts:
                    try:
                        _write_all(file, part)
                        written += len(part)
                    except OSError as error:
                        self._warn(error)
                        file.seek(0)
                        kept = _read(file, written * dtype.itemsize)
                        if len(kept) < written * dtype.itemsize:  # a network disk reports late that it is full
                            return _join([*_log_progress(make())], dtype)
                        return _join([numpy.frombuffer(kept, dtype), part, *parts], dtype)
                os.fchmod(file.fileno(), 0o644)
                try:
                    sync_file(file)
                    os.replace(name, path)
                except OSError as error:
                    self._warn(error)
                    return map_tokens(Path(name), dtype)
        finally:
            with suppress(OSError):
                os.unlink(name)
        return map_tokens(path, dtype)

    def _in_memory(
        self, make: Callable[[], Iterator[NDArray[Any]]], dtype: numpy.dtype[Any], error: Exception
    ) -> Tensor:
        self._warn(error)
        return _join([*_log_progress(make())], dtype)

    def _warn(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        log.warning("cache=%r: tokens are not cached there: %s", str(self.folder), reason)


def _join(parts: list[NDArray[Any]], dtype: numpy.dtype[Any]) -> Tensor:
    tokens = numpy.concatenate([numpy.empty(0, dtype), *parts])
    return torch.from_numpy(tokens.view(numpy.int16) if dtype.name == "uint16" else tokens)


def map_tokens(path: Path, dtype: numpy.dtype[Any]) -> Tensor:
    """Return the tokens `(n,)` in a file, mapped into memory: uint8, int16 for uint16, or int32."""
    size = path.stat().st_size // dtype.itemsize
    stored = STORED[dtype.name]
    # Not shared, so that an accidental write to the tensor does not reach the file.
    return torch.from_file(str(path), shared=False, size=size, dtype=stored) if size else torch.empty(0, dtype=stored)


def _write_all(file: Any, part: NDArray[Any]) -> None:
    unwritten = memoryview(numpy.ascontiguousarray(part).data).cast("B")
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def _read(file: Any, size: int) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    start = 0
    while start < size and (count := file.readinto(view[start:])):
        start += count
    return content if start == size else content[:start]


def _log_progress(parts: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Yield the parts, and log the progress from time to time."""
    count = 0
    logged_at = time.monotonic()
    for part in parts:
        yield part
        count += len(part)
        if time.monotonic() - logged_at > REPORT_INTERVAL:
            logged_at = time.monotonic()
            log.info("tokenizing: %s tokens so far", f"{count:,}")


def state_of(files: Iterable[str | Path]) -> list[tuple[str, int, int]]:
    """Return the paths, sizes and modification times of files, as part of a key that changes when a file does."""
    states = ((file, os.stat(file)) for file in files)
    return [(str(file), state.st_size, state.st_mtime_ns) for file, state in states]
