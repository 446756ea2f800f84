"""Locks files, so that one process has a file to itself, or does work that the others wait for."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

log = logging.getLogger("runner")

PATIENCE = 120.0  # seconds to wait for another process that makes no progress

_threads: dict[str, threading.Lock] = {}  # by path, because POSIX locks do not exclude threads of the same process
# A thread that was holding a lock does not exist in a forked child, so the child would wait for it forever.
os.register_at_fork(after_in_child=_threads.clear)


def take_lock(file: IO[Any]) -> bool | None:
    """Lock a file, open for writing, until it is closed or this process ends; return whether that succeeded.

    This is a POSIX lock, which forked data loader workers do not inherit.

    Returns:
        False if another process has the lock, None if the file system has no locks.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def lock_file(path: Path, patience: float = 0.0, mode: int = 0o644) -> IO[str] | None:
    """Return a file that stays locked until it is closed or this process ends; None when another process has the lock.

    It waits up to `patience` seconds for another process. `mode`, less the umask, is that of a new file. On a file
    system without locks, the file is returned unlocked, and nothing keeps two processes apart.
    """
    file = _open(path, mode)
    deadline = time.monotonic() + patience
    while take_lock(file) is False:
        if time.monotonic() >= deadline:
            file.close()
            return None
        time.sleep(0.05)
    return file


@contextmanager
def exclusive_lock(path: Path, doing: str, progress: Callable[[], int], patience: float = PATIENCE) -> Iterator[bool]:
    """Keep other processes and threads out of a folder within the context; a killed process gives up its lock.

    Yields:
        Whether the lock was taken: on a file system without locks, other processes may be working there too.

    Args:
        path: the lock file in that folder; it is made if it does not exist, and stays.
        doing: the work in that folder, for messages, such as 'downloads'.
        progress: returns a number that changes while another process makes progress.
        patience: seconds to wait for a process without progress.

    Raises:
        OSError: the lock file cannot be made.
        TimeoutError: another process holds the lock and makes no progress.
    """
    # Threads are locked out first, because closing the file in any thread gives up the lock of the whole process.
    in_thread = _threads.setdefault(os.path.realpath(path), threading.Lock())
    with in_thread, _open(path, 0o666) as file:
        seen = -1
        since = time.monotonic()
        while (locked := take_lock(file)) is False:
            if seen < 0:
                log.info("another process %s in %s: waiting for it", doing, path.parent)
            time.sleep(0.1)
            if (now := progress()) != seen:
                seen = now
                since = time.monotonic()
            elif time.monotonic() - since > patience:
                reason = f"another process {doing} there, and has made no progress for {patience:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason)
        yield locked is True


def _open(path: Path, mode: int) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+")


def size_of(folder: Path, pattern: str) -> int:
    """Return the total size in bytes of the files in a folder that match a pattern; deleted ones count as 0."""
    size = 0
    for file in folder.glob(pattern):
        try:
            size += file.stat().st_size
        except OSError:
            continue
    return size
