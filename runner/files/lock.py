"""Files that one process locks at a time, and work that one process does while the others wait."""

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

PATIENCE = 120.0  # seconds that others wait for one that makes no progress

_threads: dict[str, threading.Lock] = {}  # by path; POSIX's locks do not exclude threads of the same process
os.register_at_fork(after_in_child=_threads.clear)  # the child lacks the thread that would release a lock


def take_lock(file: IO[Any]) -> bool | None:
    """Lock an open file until it is closed or this process ends; return whether it is locked, None without locks.

    The lock is POSIX's, which forked data loader workers do not inherit. Some file systems have no locks.

    Args:
        file: a file that is open for writing.
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

    On a file system without locks the file is returned all the same, and nothing keeps two processes apart.

    Args:
        path: the file; it is made if it does not exist, and stays.
        patience: seconds to wait for another process to give it back.
        mode: permissions of a new file, less the umask.
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
def alone(path: Path, doing: str, progress: Callable[[], int], patience: float = PATIENCE) -> Iterator[bool]:
    """Inside the context, no other process or thread works in the folder of a lock; a killed process gives it up.

    Yields:
        Whether this is ensured: on a file system without locks, others may work there too.

    Args:
        path: the lock's file, which is created and stays.
        doing: what is done there, as a verb for messages, such as 'downloads'.
        progress: returns a number that changes while another process makes progress.
        patience: seconds to wait for another process that makes no progress.

    Raises:
        OSError: the file cannot be created.
        TimeoutError: another process makes no progress.
    """
    # Threads first: closing the file in any of them would release the lock of the process.
    in_thread = _threads.setdefault(os.path.realpath(path), threading.Lock())
    with in_thread, _open(path, 0o666) as file:
        seen = -1
        since = time.monotonic()
        while (locked := take_lock(file)) is False:
            if seen < 0:
                log.info("another process %s into %s: waiting for it", doing, path.parent)
            time.sleep(0.1)
            if (now := progress()) != seen:
                seen = now
                since = time.monotonic()
            elif time.monotonic() - since > patience:
                reason = f"another process {doing} there, and for {patience:g} s nothing has come"
                raise TimeoutError(errno.ETIMEDOUT, reason)
        yield locked is True


def _open(path: Path, mode: int) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+")


def size_of(folder: Path, pattern: str) -> int:
    """Return the size in bytes of all files in a folder that match a pattern and still exist."""
    size = 0
    for file in folder.glob(pattern):
        try:
            size += file.stat().st_size
        except OSError:
            continue
    return size
