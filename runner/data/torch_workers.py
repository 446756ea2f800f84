"""Access to the worker processes of torch's ``DataLoader``, for which torch has no public names."""

from __future__ import annotations

import copy
import itertools
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _remove_worker_pids, _set_worker_pids
from torch.utils.data import DataLoader

_keys = itertools.count()


def workers_of(source: Any) -> list[Any]:
    """Return the worker processes of an iterator; empty if this process reads, or for None."""
    return getattr(source, "_workers", [])


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with persistent workers keeps from epoch to epoch, or None."""
    return loader._iterator


def find_unfinished(error: Exception) -> Any:
    """Return the half-built iterator an error came from, or None; its workers run and nothing else references it."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((one for one in owners if workers_of(one)), None)


def discard(loader: DataLoader[Any], source: Any) -> None:
    """Detach an iterator from its loader, so that deleting it does not wait for its workers, which keep running."""
    loader._iterator = None
    if source is None:
        return
    hide(source)
    source._shutdown = True
    if hasattr(source, "_pin_memory_thread_done_event"):
        source._pin_memory_thread_done_event.set()


def without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader that starts workers of its own."""
    other = copy.copy(loader)
    other._iterator = None
    return other


def end_with(owner: Any, source: Any) -> None:
    """End the workers of an iterator when an object that refers to it is deleted.

    Where a Trainer's cycle of references holds the loader, the garbage collector may take the iterator's queues before
    the iterator, which would then wait 5 s for each worker.
    """
    weakref.finalize(owner, source._shutdown_workers).atexit = False


def hide(source: Any) -> bool:
    """Hide an iterator's workers from torch's SIGCHLD handler; return whether the handler knew them."""
    known = getattr(source, "_worker_pids_set", False)
    if known:
        _remove_worker_pids(id(source))
        source._worker_pids_set = False
    return known


@contextmanager
def deaths_raise(workers: list[Any]) -> Iterator[None]:
    """Inside the context, the death of a worker raises RuntimeError, also one that came before; outside, none does."""
    # The handler raises in the main thread, which helps only if that thread waits; other threads poll.
    if not workers or threading.current_thread() is not threading.main_thread():
        yield
        return
    key = next(_keys)
    try:
        _set_worker_pids(key, tuple(worker.pid for worker in workers))
        for worker in workers:
            if not worker.is_alive():
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) exited unexpectedly")
        yield
    finally:
        # If the handler raised just before this, it emptied the list of this key, which is never used again.
        _remove_worker_pids(key)
