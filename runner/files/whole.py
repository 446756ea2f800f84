"""Files that are there whole or not at all, and what is read of those that others have torn."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file aside, sync it and give it its name: after a kill or a power cut the old one is there, or the new.

    Args:
        path: its folder is made.
        content: text is written as UTF-8.
        mode: its permissions, as far as the umask leaves them.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    # A name that nobody can foresee, and must be new: no link that lies in the folder is followed.
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Have the names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is no such file, or it is torn or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
