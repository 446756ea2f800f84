"""Find, verify and read checkpoints on disk. They are written atomically, and a manifest reveals later damage."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runner.checkpoints.contents import check_content
from runner.checkpoints.manifest import MANIFEST, read_manifest, saved_at
from runner.checkpoints.shards import SUFFIX, join
from runner.distributed.ranks import get_global_rank, get_world_size
from runner.distributed.together import gather_objects
from runner.failures.errors import UnreadableCheckpoint
from runner.files.whole import read_object

log = logging.getLogger("runner")

MODEL_CONFIG = "config.json"
Snapshot = dict[str, Any]
"""Content by file name (`.pt` or `.json`), and the training time under 'timestamp'. A sharded snapshot also has
'layouts': the `ShardLayout` of each tensor that is only a part, by the tensor's `id`."""


def discard(path: Path) -> None:
    """Remove a checkpoint folder atomically: under its own name it is complete or gone."""
    shutil.rmtree(hide(path), ignore_errors=True)


def hide(path: Path) -> Path:
    """Rename a checkpoint folder to a hidden name, and return it. After a kill, `find_checkpoint` falls back to it."""
    hidden = path.parent / f".{path.name}.discarded-{os.getpid()}"
    os.rename(path, hidden)
    return hidden


def verify(path: str | Path, rank: int = 0, ranks: int = 1) -> str | None:
    """Return why a folder is not an intact checkpoint, or None if every file matches its manifest and can be loaded.

    If `ranks` ranks verify the folder together, each hashes its share of the files.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
        for index, (name, facts) in enumerate(manifest.files.items()):
            if Path(name).name != name or not stat.S_ISREG((path / name).stat().st_mode):
                return f"its manifest names {name!r}, which is not a file in its folder"
            if (path / name).stat().st_size != facts["size"]:
                return f"the size of {name} differs from its manifest"
            if index % ranks == rank and _hash(path / name) != facts["sha256"]:
                return f"{name} was modified: its SHA-256 differs from its manifest"
        for name in manifest.files:
            if name.endswith(".pt"):
                read_file(path, name, mapped=True)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, UnreadableCheckpoint) as error:
        return str(error)
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_together(path: str | Path) -> str | None:
    """Return the first fault that `verify` finds on any rank; each hashes some of the files. Call it on all ranks."""
    faults = gather_objects(verify(path, get_global_rank(), get_world_size()))
    return next((fault for fault in faults if fault is not None), None)


def is_complete(path: str | Path) -> bool:
    """Return whether a folder is a complete, unmodified checkpoint."""
    return verify(path) is None


def find_checkpoint(path: str | Path, check: Callable[[Path], str | None] | None = None) -> Path:
    """Return the checkpoint to use: `path` itself, or the newest intact one in a run's folder.

    Truncated or modified checkpoints are reported, and the previous one is used. `check` returns why a checkpoint is
    not intact, or None; by default it is `verify`, called only once for an unchanged checkpoint.

    Raises:
        FileNotFoundError: `path` holds no intact checkpoint.
        ValueError: `path` itself is a checkpoint that was truncated or modified.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        fault = (check or verify)(path)
        if fault is not None:
            raise ValueError(f"checkpoint {str(path)!r} cannot be used: {fault}")
        return path.resolve()
    for names in ("[!.]*", ".*.discarded-*"):  # the latter remain after a kill during a replacement
        # A run keeps its checkpoints in a subfolder, whose name is set in its config.
        manifests = (file for up in ("", "[!.]*/") for file in path.glob(f"{up}{names}/{MANIFEST}"))
        checkpoints = {Path(os.path.realpath(file)).parent for file in manifests}
        for checkpoint in sorted(checkpoints, key=saved_at, reverse=True):
            try:
                facts = tuple((file, file.lstat().st_size, file.lstat().st_mtime_ns) for file in checkpoint.iterdir())
            except FileNotFoundError:  # a run that still trains has removed it meanwhile
                continue
            if _report(checkpoint, check(checkpoint)) if check is not None else _is_usable(checkpoint, facts):
                return checkpoint
    raise FileNotFoundError(f"path={str(path)!r}: no complete checkpoint there; give a run's folder or a checkpoint's")


@functools.lru_cache
def _report(path: Path, fault: str | None) -> bool:
    """Return whether a checkpoint has no fault; rank 0 reports each fault once."""
    if fault is not None and get_global_rank() == 0:
        log.warning("checkpoint %s is not used: %s", path, fault)
    return fault is None


@functools.lru_cache
def _is_usable(path: Path, facts: tuple[Any, ...]) -> bool:
    """Return whether a checkpoint is intact; thanks to the cache, unchanged files are read only once."""
    return _report(path, verify(path))


def read_config(path: str | Path) -> dict[str, Any] | None:
    """Return the config of the run that wrote a verified checkpoint, or None if the checkpoint has no config."""
    return read_object(Path(path) / MODEL_CONFIG) or None


def read_file(path: str | Path, name: str, mapped: bool = False) -> Any:
    """Return the content of a checkpoint's file, with tensors on the CPU. Sharded tensors are read on first use.

    Args:
        path: the folder of the checkpoint.
        name: `model.pt` or `state.pt`.
        mapped: whether to map the file into memory instead of reading it, if only its structure matters.

    Raises:
        UnreadableCheckpoint: the file contains more than tensors, numbers, strings, lists and dicts, takes more memory
            than its size, or lacks a required entry.
    """
    path = Path(path)
    content = read_tensors(path / name, mapped)
    manifest = read_manifest(path)
    return join(content, name, path, manifest) if any(file.endswith(SUFFIX) for file in manifest.files) else content


def read_tensors(path: Path, mapped: bool = False) -> Any:
    """Return the content of a file of `torch.save` like `read_file`, but without joining its shards.

    Raises:
        UnreadableCheckpoint: see `read_file`.
    """
    try:
        _check_zip(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        check_content(path.name, content)
        return content
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))  # the rest of torch's message explains how to unpickle anyway
        objects = f"objects ({match[1]})" if match else "objects"
        raise UnreadableCheckpoint(
            f"{path} holds {objects} that would have to be unpickled, which could run code, so it is rejected"
        ) from None
    except Exception as error:  # for damaged files, torch raises many types
        reason = f"{error}".partition("\n")[0] or "it ends too early"
        raise UnreadableCheckpoint(f"{path} was not written by this project: {reason}") from None


def _check_zip(path: Path) -> None:
    """Check that a file of `torch.save` unpacks to no more than its size."""
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
    if any(item.compress_type != zipfile.ZIP_STORED or item.file_size != item.compress_size for item in entries):
        raise ValueError("it has compressed entries")
    if sum(item.file_size for item in entries) > path.stat().st_size:
        raise ValueError("its parts overlap")
