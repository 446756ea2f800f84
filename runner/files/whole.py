"""Writes files completely or not at all, and reads files that may be incomplete."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import IO, Any, BinaryIO


def write_atomically(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file under a temporary name, sync and rename it: a kill or power cut leaves the old or the new file.

    Text is encoded as UTF-8. The folder is made if it does not exist. `mode`, less the umask, is that of the file.

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
    """Make the content of a file, open for writing, survive a power cut."""
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
    """Return the content of a regular file of at most `most` bytes, and refuse anything else.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: the file is larger, or it is a folder, a pipe or a device.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{path}: {size:,} bytes, at most {most:,} are read")
        return file.read(most)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, and refuse anything else: reading a pipe might never end.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is a folder, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb")


def read_object(path: Path, most: int = 100_000_000) -> dict[str, Any]:
    """Return the JSON object in a file of at most `most` bytes; an empty one if the file is missing or incomplete."""
    try:
        content = json.loads(read_bounded(path, most))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def link_or_copy(source: str, target: str) -> None:
    """Make a file that shares disk blocks with another, or a copy if the file system cannot do that."""
    try:
        os.link(source, target)
    except OSError:  # on another file system, or on one without links
        shutil.copyfile(source, target)
