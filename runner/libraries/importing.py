"""Import large libraries, and exclude their objects from garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from runner.libraries.shortcuts import is_enabled


@contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector from searching the objects that imports in the `with` block make, now and later.

    Torch and MLflow make hundreds of thousands of objects that live until the process ends, and each search through all
    of them takes up to 0.1 s. Only the first block of a process excludes objects for good: later ones would also keep
    the garbage of earlier jobs.
    """
    if not is_enabled("collector"):
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _freeze()
        if was_enabled:
            gc.enable()


@cache  # once in a process; gc.get_freeze_count() takes 30 ms
def _freeze() -> None:
    gc.freeze()
