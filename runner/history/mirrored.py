"""Finds, downloads and verifies runs that `CheckpointSaver(mirror=...)` has uploaded to an address."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from runner.checkpoints.mirror import Index, Mirror
from runner.failures.errors import WrongKey
from runner.files.addresses import without_credentials, without_credentials_of
from runner.files.names import CONFIG
from runner.libraries.remote_files import check_address
from runner.records.folder import make_run_folder, remove_unused
from runner.records.listing import OUTPUTS
from runner.terminal.console import show_path
from runner.terminal.text import print_to_stderr

PARTIAL = ".download"  # in the new folder, until the download is complete
_temporary: list[TemporaryDirectory[str]] = []
"""Folders of downloaded runs that are only read; removed when this process ends."""


def is_address(text: str) -> bool:
    """Return whether the name of a run is an address rather than a path or an id."""
    return "://" in text


def mirror_of(address: str) -> str:
    """Return the address of the folder above a run's folder, without credentials."""
    return without_credentials(address).rstrip("/").rpartition("/")[0]


def download_run(address: str, keep: bool) -> Path:
    """Download a run's record, its newest intact checkpoint and its best checkpoints, and return their new folder.

    Set `keep` if the run will continue in that folder. The folder is then in `outputs/`, where a process restarted by
    torchrun or Slurm finds it and downloads nothing. Otherwise it is temporary.
    """
    check_address("RUN", address)
    shown = without_credentials(address)
    try:
        mirror, indexes = _find(address)
    except Exception as error:  # each file system raises its own exceptions
        raise WrongKey("RUN", f"cannot be read: {_reason(address, error)}", repr(shown)) from error
    if not indexes:
        names = mirror.names()
        example = f", such as {shown.rstrip('/')}/{names[0]}" if names else ""
        raise WrongKey("RUN", f"holds no checkpoint of a run; give the address of a run{example}", repr(shown))
    folder = _make_folder(address, keep)
    if (folder / CONFIG).exists():
        return folder
    reasons = []
    for name, index in indexes.items():
        try:
            _download(mirror, name, index, folder)
        except Exception as error:
            reasons.append(f"{name}: {_reason(address, error)}")
            _warn(address, name, error)
        else:
            destination = f" to {show_path(folder)}" if keep else ""
            print_to_stderr(f"INFO: RUN={shown!r}: downloaded {name}{destination}")
            return folder
        finally:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    remove_unused()
    raise WrongKey("RUN", f"none of its checkpoints can be used: {'; '.join(reasons)}", repr(shown))


def _find(address: str) -> tuple[Mirror, dict[str, Index]]:
    """Return the mirror of a run, and the indexes of its checkpoints by name, newest first."""
    mirror = Mirror(address)
    try:
        index = mirror.read_index()
    except FileNotFoundError:
        return mirror, mirror.saved(partial(_warn, address))
    parent, _, name = address.rstrip("/").rpartition("/")
    if name != index.name:
        raise ValueError(f"it holds the checkpoint {index.name!r}; give the address of the folder of that name")
    return Mirror(parent), {name: index}


def _make_folder(address: str, keep: bool) -> Path:
    if keep:
        digest = hashlib.sha256(address.encode()).hexdigest()  # an address may contain a password
        return Path(make_run_folder(OUTPUTS, f"/download/{digest}"))
    _temporary.append(TemporaryDirectory(prefix="runner-mirror-"))
    return Path(_temporary[-1].name)


def _download(mirror: Mirror, name: str, index: Index, folder: Path) -> None:
    """Download a checkpoint, the run's record, and the checkpoints that were the best when this one was saved.

    The config appears last: a folder that has it is complete.

    Raises:
        ValueError: the run has no record, or a file does not match its index.
        OSError: the disk is full, or a file is missing from the mirror.
    """
    if CONFIG not in index.files:
        raise ValueError("its run was started in Python and has no record (config.yaml), so no command can continue it")
    staging = folder / PARTIAL
    staging.mkdir()
    mirror.download(index, name, staging)
    checkpoints = (staging / index.checkpoint).parent
    (checkpoints / "latest").symlink_to(index.name)
    for best in index.best:
        if best != index.name:
            _download_best(mirror, best, staging)
    if index.best and (checkpoints / index.best[0]).is_dir():
        (checkpoints / "best").symlink_to(index.best[0])
    for path in sorted(staging.iterdir(), key=lambda path: path.name == CONFIG):  # the config last
        path.rename(folder / path.name)


def _download_best(mirror: Mirror, name: str, into: Path) -> None:
    """Download a checkpoint without its record; skip it if it is missing or damaged."""
    with suppress(FileNotFoundError, ValueError):
        index = mirror.read_index(name)
        try:
            mirror.download(index, name, into, only=f"{index.checkpoint}/")
        except ValueError:
            shutil.rmtree(into / index.checkpoint)
            raise


def _warn(address: str, name: str, error: Exception) -> None:
    print_to_stderr(f"WARNING: {without_credentials(address)}: {name} is not used: {_reason(address, error)}")


def _reason(address: str, error: Exception) -> str:
    """Return the reason for a failure in one line, without credentials."""
    return " ".join(without_credentials_of(address, f"{error or type(error).__name__}").split())[:300]
