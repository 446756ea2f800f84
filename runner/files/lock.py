"""Files that one process has at a time, and work that one does while the others wait."""

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

PATIENCE = 120.0  # seconds that others wait while one makes no progress

_threads: dict[str, threading.Lock] = {}  # by path: POSIX's locks keep no two threads of a process apart
os.register_at_fork(after_in_child=_threads.clear)  # the thread that would release one is not there


def take_lock(file: IO[Any]) -> bool | None:
    """Lock an open file until it is closed or this process ends; return whether that is done, None: it cannot be.

    The lock is POSIX's, which forked data loader workers do not inherit. Some file systems have none.

    Args:
        file: open for writing.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


@contextmanager
def alone(path: Path, doing: str, progress: Callable[[], int], patience: float = PATIENCE) -> Iterator[bool]:
    """Inside, no other process or thread works in the folder of a lock; a process that is killed is out.

    Yields:
        Whether that is so: on a file system without locks others may be there too.

    Args:
        path: of the lock, a file that is made and stays.
        doing: what is done there, for messages, such as 'downloads'.
        progress: gives a number that changes while another process gets on.
        patience: seconds to wait for one that does not.

    Raises:
        OSError: the file cannot be made.
        TimeoutError: another process makes no progress.
    """
    # Threads first: to close the file, in whichever of them, gives back the lock of all.
    in_thread = _threads.setdefault(os.path.realpath(path), threading.Lock())
    with in_thread, os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+") as file:
        seen, since = -1, time.monotonic()
        while (locked := take_lock(file)) is False:
            if seen < 0:
                log.info("another process %s into %s: waiting for it", doing, path.parent)
            time.sleep(0.1)
            if (now := progress()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                reason = f"another process {doing} there, and for {patience:g} s nothing has come"
                raise TimeoutError(errno.ETIMEDOUT, reason)
        yield locked is True


def size_of(folder: Path, pattern: str) -> int:
    """Return the bytes of all files of a folder that fit a pattern, as far as they are still there."""
    size = 0
    for file in folder.glob(pattern):
        try:
            size += file.stat().st_size
        except OSError:
            continue
    return size
