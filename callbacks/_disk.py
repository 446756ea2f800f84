"""Keeps training going when a callback cannot write to the disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("runner")


@contextmanager
def disk_errors_reported(writer: str) -> Iterator[None]:
    """Turn an `OSError` inside the block into a warning, so that training continues."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot write (%s): training continues without it", writer, error)
