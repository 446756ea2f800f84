"""Write checkpoints atomically, from one rank or from all of them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from runner.checkpoints.files import Snapshot, hide
from runner.checkpoints.manifest import FORMAT, LATEST, MANIFEST, saved_at
from runner.checkpoints.shards import SUFFIX, split, write_safetensors
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.together import do_together
from runner.files.whole import sync_file, sync_folder

LARGE = 1 << 20
"""Smallest data, in bytes, that is hashed in parallel with writing."""


def write_checkpoint(
    snapshot: Snapshot | None,
    path: str | Path,
    group: ProcessGroup | None = None,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Write the snapshot that `capture` returned; a rank whose snapshot is None writes nothing.

    The files are written to a hidden folder beside `path` and synced; a single rename then makes them visible. If the
    snapshot is sharded, call this on all ranks: each writes its own file, to a file system that all of them share.

    Args:
        snapshot: the result of `capture`.
        path: the folder to write.
        group: process group in which the ranks coordinate a sharded save; None: that of training.
        before: called first, on rank 0.
        after: called on rank 0 once the checkpoint is complete.

    Raises:
        FileExistsError: `path` exists and is not a checkpoint.
        OSError: the disk is full or the folder is read-only, or `before` raised it; no partial checkpoint is left
            behind. All ranks raise it.
    """
    if snapshot is None:
        return
    path = Path(path)
    is_first = get_global_rank() == 0
    together: Callable[..., list[Any]] = partial(do_together, group=group) if "layouts" in snapshot else _do_alone
    parts: dict[str, Tensor] = {}
    if "layouts" in snapshot:
        snapshot, parts = split(snapshot)
    folder, save = together(lambda: _make_hidden(path, before) if is_first else ("", ""))[0]
    hidden = Path(folder)
    try:
        files_by_rank = together(lambda: _write_parts(hidden, parts, save))
        shards = {name: facts for files in files_by_rank for name, facts in files.items()}
        together(lambda: _complete(snapshot, hidden, path, shards, save, after) if is_first else None)
    except BaseException:
        if is_first:
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def _do_alone(function: Callable[[], Any]) -> list[Any]:
    return [function()]


def _make_hidden(path: Path, before: Callable[[], object]) -> tuple[str, str]:
    """Make the hidden folder, and return its path and the ID of this save."""
    before()
    if path.exists() and not os.path.lexists(path / MANIFEST):
        raise FileExistsError(f"path={str(path)!r} exists and is not a checkpoint: choose another name")
    hidden = path.parent / f".{path.name}.partial-{os.getpid()}"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    return str(hidden), secrets.token_hex(8)


def _write_parts(folder: Path, parts: dict[str, Tensor], save: str) -> dict[str, Any]:
    """Write this rank's file if it has parts, and return its size and hash by its name."""
    if not parts:
        return {}
    path = folder / f"shard-{get_global_rank():05}-of-{get_world_size():05}{SUFFIX}"
    return {path.name: write_file(path, lambda file: write_safetensors(file.write, parts, {"save": save}))}


def _complete(
    snapshot: Snapshot, hidden: Path, path: Path, shards: dict[str, Any], save: str, after: Callable[[], object]
) -> None:
    """Write the other files and the manifest, and make the checkpoint visible."""
    for name, facts in shards.items():
        if (hidden / name).stat().st_size != facts["size"]:
            raise OSError(f"{name} is missing, but another rank wrote it: {path.parent} must be shared by all ranks")
    files = {name: _write(hidden / name, snapshot[name]) for name in snapshot if "." in name}
    manifest = {
        "format": FORMAT,
        "timestamp": snapshot["timestamp"],
        "saved_at": max(time.time(), saved_at(path.parent / LATEST) + 1e-3),  # grows even if the clock is set back
        "torch": torch.__version__,
        "files": {**files, **shards},
        **({"save": save} if shards else {}),
    }
    _write(hidden / MANIFEST, manifest)
    sync_folder(hidden)
    _replace(path, hidden)
    sync_folder(path.parent)
    after()


def _replace(path: Path, new: Path) -> None:
    old = hide(path) if path.exists() else None
    os.rename(new, path)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


class _HashingFile:
    """A file that hashes its content while writing, in `thread` if the data is large.

    `error` keeps an OSError that `torch.save` would replace with another error.
    """

    def __init__(self, file: BinaryIO, thread: Executor) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None
        self._thread = thread

    def write(self, data: Any) -> int:
        wait = self._hash(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            wait()  # the caller may then reuse the memory

    def flush(self) -> None:
        self.file.flush()

    def _hash(self, data: Any) -> Callable[[], None]:
        """Hash data, in the thread if it is large, and return a function that waits for the hash."""
        if len(data) >= LARGE:
            with suppress(RuntimeError):  # no threads can be started while the interpreter shuts down
                return self._thread.submit(self.digest.update, data).result
        self.digest.update(data)
        return lambda: None


def _write(path: Path, content: Any) -> dict[str, Any]:
    """Write a `.json` or `.pt` file, and return its size and hash for the manifest."""
    if path.suffix == ".json":
        return write_file(path, lambda file: file.write(json.dumps(content, indent=1, default=str).encode()))
    return write_file(path, lambda file: torch.save(content, file))  # type: ignore[arg-type]


def write_file(path: Path, fill: Callable[[_HashingFile], object]) -> dict[str, Any]:
    """Open a file, write it with a function, sync it, and return its size and hash for the manifest.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """
    with path.open("wb") as raw, ThreadPoolExecutor(1, "hash") as thread:
        file = _HashingFile(raw, thread)
        try:
            fill(file)
            sync_file(raw)
        except Exception as error:
            raise (file.error or error) from None
        return {"size": raw.tell(), "sha256": file.digest.hexdigest()}
