"""What becomes of a disk that is full or gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("runner")


@contextmanager
def disk_errors_reported(writer: str) -> Iterator[None]:
    """Inside, writing ends where the disk refuses; that is said, and training goes on.

    Args:
        writer: who writes, a config key.
    """
    try:
        yield
    except OSError as error:
        log.warning("%s cannot write (%s): training goes on without it", writer, error)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all; its folder is made.

    Raises:
        OSError: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
