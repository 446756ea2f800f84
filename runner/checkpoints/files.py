"""Checkpoints on disk. They appear whole or not at all, and a manifest reveals one that was damaged later."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runner.files.whole import sync_file, sync_folder

log = logging.getLogger("runner")

FORMAT = 1
MANIFEST = "manifest.json"
CONFIG = "config.json"
LATEST = "latest"  # link beside a run's checkpoints
Snapshot = dict[str, Any]
"""Content by file name (`.pt` or `.json`), and the training time under 'timestamp'."""


def write_checkpoint(snapshot: Snapshot | None, path: str | Path) -> None:
    """Write what `capture` returned. That is None on ranks other than 0, where nothing is written.

    The files are written to a hidden folder beside `path` and synced; a single rename then makes them visible.

    Raises:
        FileExistsError: `path` exists and is not a checkpoint.
        OSError: the disk is full or the folder is read-only; no partial checkpoint is left behind.
    """
    if snapshot is None:
        return
    path = Path(path)
    if path.exists() and not (path / MANIFEST).exists():
        raise FileExistsError(f"path={str(path)!r} exists and is not a checkpoint: choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        manifest = {
            "format": FORMAT,
            "timestamp": snapshot["timestamp"],
            "saved_at": max(time.time(), saved_at(path.parent / LATEST) + 1e-3),  # grows even if a clock is set back
            "torch": torch.__version__,
            "files": {name: _write_file(partial / name, snapshot[name]) for name in snapshot if "." in name},
        }
        _write_file(partial / MANIFEST, manifest)
        sync_folder(partial)
        _replace(path, partial)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(path: Path, by: Path) -> None:
    hidden = _hide(path) if path.exists() else None
    os.rename(by, path)
    if hidden is not None:
        shutil.rmtree(hidden, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a checkpoint folder, which is never seen half removed under its name."""
    shutil.rmtree(_hide(path), ignore_errors=True)


def _hide(path: Path) -> Path:
    """Rename a checkpoint folder to a hidden name, on which `find_checkpoint` falls back after a kill; return that."""
    hidden = path.parent / f".{path.name}.discarded-{os.getpid()}"
    os.rename(path, hidden)
    return hidden


def verify(path: str | Path) -> str | None:
    """Return why a folder is not an intact checkpoint, or None if every file matches its manifest."""
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] > FORMAT:
            return f"it has format {manifest['format']}, which a later version of this project wrote"
        files = manifest["files"]
        for name, facts in {"model.pt": files["model.pt"], **files}.items():
            if Path(name).name != name or not stat.S_ISREG((path / name).stat().st_mode):
                return f"its manifest names {name!r}, which is not a file in its folder"
            if (path / name).stat().st_size != facts["size"]:
                return f"the size of {name} differs from its manifest"
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                    return f"{name} was modified: its SHA-256 differs from its manifest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    return None


def is_complete(path: str | Path) -> bool:
    """Return whether a folder is a complete, unmodified checkpoint."""
    return verify(path) is None


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint to use: `path` itself, or the newest intact one in a run's folder.

    Truncated or modified checkpoints are reported, and the previous one is used.

    Raises:
        FileNotFoundError: `path` holds no intact checkpoint.
        ValueError: `path` itself is a checkpoint that was truncated or modified.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        fault = verify(path)
        if fault is not None:
            raise ValueError(f"checkpoint {str(path)!r} cannot be used: {fault}")
        return path.resolve()
    for names in ("[!.]*", ".*.discarded-*"):  # the latter are left by a kill during a replacement
        # A run keeps its checkpoints in a folder of their own, which its config may rename.
        found = {one.resolve().parent for up in ("", "[!.]*/") for one in path.glob(f"{up}{names}/{MANIFEST}")}
        for one in sorted(found, key=saved_at, reverse=True):
            if _is_usable(one, tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in one.iterdir())):
                return one
    raise FileNotFoundError(f"path={str(path)!r}: no complete checkpoint there; give a run's folder or a checkpoint's")


@functools.lru_cache
def _is_usable(path: Path, facts: tuple[Any, ...]) -> bool:
    """Return whether a checkpoint is intact; a damaged one is reported once, and unchanged files are read only once."""
    fault = verify(path)
    if fault is not None:
        log.warning("checkpoint %s is not used: %s", path, fault)
    return fault is None


def saved_at(path: Path) -> float:
    """Return when a checkpoint was written, by its manifest if possible, since copying changes the times of files."""
    try:
        return float(json.loads((path / MANIFEST).read_text())["saved_at"])
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, LookupError, TypeError):
        return (path / MANIFEST).stat().st_mtime


def read_config(path: str | Path) -> dict[str, Any] | None:
    """Return the config of the run that wrote a checkpoint, or None if it has none.

    Args:
        path: the folder of the checkpoint, already verified.
    """
    file = Path(path) / CONFIG
    return json.loads(file.read_text()) if file.exists() else None


def read_file(path: str | Path, name: str) -> Any:
    """Return the content of a checkpoint's file, with tensors on the CPU.

    Raises:
        ValueError: the file contains more than tensors, numbers, strings, lists and dicts, or cannot be read.
    """
    try:
        return torch.load(Path(path) / name, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))  # the rest of torch's message explains how to unpickle anyway
        what = f"objects ({found[1]})" if found else "objects"
        raise ValueError(
            f"{Path(path) / name} holds {what} that would have to be unpickled, which could run code: refused"
        ) from None
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{Path(path) / name} was not written by torch.save: {error or 'it ends too early'}") from None


class _HashingFile:
    """A file that hashes what is written to it, and keeps an OSError that torch.save would replace by its own error."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.digest.update(data)
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write_file(path: Path, content: Any) -> dict[str, Any]:
    with path.open("wb") as raw:
        file = _HashingFile(raw)
        try:
            if path.suffix == ".json":
                file.write(json.dumps(content, indent=1, default=str).encode())
            else:
                torch.save(content, file)  # type: ignore[arg-type]
            sync_file(raw)
        except Exception as error:
            raise (file.error or error) from None
        return {"size": raw.tell(), "sha256": file.digest.hexdigest()}
