"""GPUs for the parallel jobs of a sweep: each job leases its own, and sees no others."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO

from runner.failures.exit_codes import TERMINATED
from runner.files.lock import lock_file

VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL = 0.5  # seconds between two attempts to lease

_held: list[IO[str]] = []
"""Locked files, one for each GPU that the current job of this process has leased."""
_chosen: list[str] = []
"""GPUs that this process has leased so far; later jobs use them again, because CUDA, once started, sees no others."""


def lease(number: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Lease the lowest free GPUs and hide all others from this process, waiting if necessary. Before CUDA starts.

    Nothing is leased if the machine has fewer GPUs than that. A lease ends with this process, or with `given_back`.
    It waits no longer once `is_over` returns True: then the job is no longer wanted.

    Raises:
        SystemExit: the job was called off while it waited.
        PermissionError: the folder of lock files belongs to another user.
    """
    if number > len(_gpus()):
        return
    wanted = [*_chosen[:number], *(one for one in _gpus() if one not in _chosen)]
    least = min(number, len(_chosen))  # of them, in this order
    has_told = False
    while not _take(wanted, number, least):
        if not has_told:
            has_told = True
            print(f"INFO: waiting for {number} of the GPUs {', '.join(wanted)}: other jobs use them", file=sys.stderr)
        if is_over():
            raise SystemExit(TERMINATED)
        time.sleep(POLL)
    os.environ[VISIBLE] = ",".join(_chosen[:number])


@contextmanager
def given_back() -> Iterator[None]:
    """On exit, give back the GPUs that were leased within the context."""
    try:
        yield
    finally:
        while _held:
            _held.pop().close()


@functools.cache
def _gpus() -> list[str]:
    """Return the GPUs that this process saw when it started, as CUDA names them: numbers or UUIDs."""
    if VISIBLE in os.environ:
        return [*takewhile(lambda one: one not in ("", "-1"), map(str.strip, os.environ[VISIBLE].split(",")))]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # asks the driver without starting CUDA


def _take(wanted: list[str], number: int, least: int) -> bool:
    """Lock the first free GPUs of those wanted, including all of the first `least`; lock none if that is impossible."""
    folder = Path(tempfile.gettempdir()) / f"runner-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    choosing = lock_file(folder / "choosing", mode=0o600)
    if choosing is None:  # one process chooses at a time, so that none holds some GPUs and waits for the rest
        return False
    with choosing:
        taken = []
        for place, one in enumerate(wanted):
            if len(_held) == number:
                break
            file = lock_file(folder / one.replace("/", "-"), mode=0o600)
            if file is None:
                if place < least:
                    break
                continue
            _held.append(file)
            taken.append(one)
        if len(_held) < number:
            while _held:
                _held.pop().close()
            return False
    _chosen[:number] = taken
    return True
