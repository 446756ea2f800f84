"""GPUs for the jobs of a sweep that run at the same time: each has some to itself, and sees no others."""

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

from runner.files.lock import lock_file

VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL = 0.5  # seconds between two looks at who has what

_held: list[IO[str]] = []
"""Locked, one for each GPU of the job that this process works on."""
_chosen: list[str] = []
"""What this process has leased so far. A later job has the same: CUDA and other ranks, once started, see no others."""


def lease(number: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Have GPUs that no other leases, the lowest free ones, and see only these; waits for them. Before CUDA starts.

    Does nothing where there are not so many. A lease ends with this process, or with `given_back`.

    Args:
        number: of GPUs.
        is_over: asked while it waits; true: the job is not wanted any more.

    Raises:
        SystemExit: it is over.
        PermissionError: somebody else has made the folder in which it is written down who has what.
    """
    if number > len(_gpus()):
        return
    wanted = [*_chosen[:number], *(one for one in _gpus() if one not in _chosen)]
    least = min(number, len(_chosen))  # of them, in this order
    has_told = False
    while not _take(wanted, number, least):
        if not has_told:
            has_told = True
            print(f"INFO: waits for {number} of the GPUs {', '.join(wanted)}: other jobs have them", file=sys.stderr)
        if is_over():
            raise SystemExit(143)
        time.sleep(POLL)
    os.environ[VISIBLE] = ",".join(_chosen[:number])


@contextmanager
def given_back() -> Iterator[None]:
    """After it, what was leased inside is free for others."""
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

    return [str(index) for index in range(torch.cuda.device_count())]  # asks the driver, and starts no CUDA


def _take(wanted: list[str], number: int, least: int) -> bool:
    """Lock the first free ones of those wanted, but all of the first `least`; none at all where that fails."""
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
