"""What becomes of a disk that is full or gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
