"""Files that are written whole or not at all, and reading files that may be torn."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import IO, Any


def write_whole(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file under a temporary name, sync it and rename it: a kill or a power cut leaves the old file or the new.

    Text is encoded as UTF-8. The folder is made if it does not exist; `mode` is less the umask.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; an existing file stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    # The name is unpredictable and must be new, so that no link in the folder is followed.
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            sync_file(file)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(file: IO[Any]) -> None:
    """Make the content of a file that is open for writing survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes, refusing anything else in its place.

    Raises:
        OSError: there is no such file, or it is a pipe or a device.
        ValueError: the file is larger.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would be waited for
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path}: not a regular file")
        if status.st_size > most:
            raise ValueError(f"{path}: {status.st_size:,} bytes, at most {most:,} are read")
        return file.read(most)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file is missing, torn, or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def link_or_copy(source: str, target: str) -> None:
    """Make a file that shares its blocks on the disk with another, or a copy of it where that cannot be."""
    try:
        os.link(source, target)
    except OSError:  # on another file system, or on one without links
        shutil.copyfile(source, target)
