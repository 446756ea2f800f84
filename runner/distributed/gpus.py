"""GPUs for the parallel jobs of a sweep: each job leases its own and sees no others."""

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
"""Locked files, one for each GPU that this process has leased for its current job."""
_chosen: list[str] = []
"""GPUs that this process leased before; later jobs lease them again, because CUDA, once started, sees no others."""


def lease(number: int, is_over: Callable[[], bool] = lambda: False) -> None:
    """Lease the first `number` free GPUs, and hide all others from this process.

    Call it before CUDA starts. Nothing is leased if the machine has fewer than `number` GPUs. A lease ends with this
    process, or on the exit of `given_back`. If too few GPUs are free, it waits until `is_over` returns True, because
    the job is no longer needed.

    Raises:
        SystemExit: the job was called off during the wait.
        PermissionError: the folder of lock files belongs to another user.
    """
    if number > len(_gpus()):
        return
    candidates = [*_chosen[:number], *(gpu for gpu in _gpus() if gpu not in _chosen)]
    required = min(number, len(_chosen))  # the first candidates, which CUDA may see already
    has_reported = False
    while not _take(candidates, number, required):
        if not has_reported:
            has_reported = True
            print(
                f"INFO: waiting for {number} of the GPUs {', '.join(candidates)}: other jobs use them", file=sys.stderr
            )
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
    """Return the GPUs that this process saw at its start, as CUDA names them: numbers or UUIDs."""
    if VISIBLE in os.environ:
        return [*takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, os.environ[VISIBLE].split(",")))]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]  # asks the driver without starting CUDA


def _take(candidates: list[str], number: int, required: int) -> bool:
    """Lock the first free candidates, including all of the first `required`; lock none if there are not enough."""
    folder = Path(tempfile.gettempdir()) / f"runner-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    choosing = lock_file(folder / "choosing", mode=0o600)
    if choosing is None:  # one process chooses at a time, so that no two wait for each other's GPUs
        return False
    with choosing:
        taken = []
        for position, gpu in enumerate(candidates):
            if len(_held) == number:
                break
            file = lock_file(folder / gpu.replace("/", "-"), mode=0o600)
            if file is None:
                if position < required:
                    break
                continue
            _held.append(file)
            taken.append(gpu)
        if len(_held) < number:
            while _held:
                _held.pop().close()
            return False
    _chosen[:number] = taken
    return True
