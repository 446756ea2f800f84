"""Imports of large libraries, whose objects no search for garbage needs to go through."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from runner.libraries.shortcuts import is_taken


@contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector from searching what is imported in the `with` block, now and later.

    Torch and MLflow make hundreds of thousands of objects that live until the process ends, and each search through all
    of them takes up to a tenth of a second. Only the first block of a process spares objects for good, or it would keep
    the garbage of the jobs before it.
    """
    if not is_taken("collector"):
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _freeze()
        if enabled:
            gc.enable()


@cache  # once in a process; gc.get_freeze_count() counts for 30 ms
def _freeze() -> None:
    gc.freeze()
