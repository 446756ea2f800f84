"""A deadline for the first batch of each data worker, as a worker may hang while it starts."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import psutil

from runner.failures.facts import annotate

FIRST_BATCH = 600.0  # seconds for a worker to start and to read its first batch


class LateWorker:
    """Kills a worker whose first batch is overdue, after making it print its stack.

    Args:
        reader: the `BatchReader` that the workers read for; only a weak reference to it is kept.
        num_workers: number of workers; each delivers every `num_workers`-th batch.
    """

    def __init__(self, reader: Any, num_workers: int) -> None:
        self._reader = weakref.ref(reader)
        self._num_workers = num_workers
        self._delivered = 0
        self._message = ""
        self._timer = threading.Timer(FIRST_BATCH, self._end)
        self._timer.daemon = True
        self._timer.start()
        weakref.finalize(reader, self._timer.cancel).atexit = False

    def count_batch(self) -> bool:
        """Count a batch; return whether every worker has delivered one, which ends the watch."""
        self._delivered += 1
        is_over = self._delivered == self._num_workers
        if is_over:
            self._timer.cancel()
        return is_over

    def cancel(self) -> bool:
        """End the watch, and return whether it has killed a worker."""
        self._timer.cancel()
        return bool(self._message)

    def failure(self) -> RuntimeError:
        """Return the error to raise for the worker that was killed."""
        error = RuntimeError(self._message)
        annotate(error, of_environment=True)
        return error

    def _end(self) -> None:
        reader: Any = self._reader()
        workers = [] if reader is None else reader.workers
        late = f"has not delivered its first batch within {FIRST_BATCH:.0f} s"
        if workers:
            number = self._delivered % len(workers)
            worker = workers[number]
            self._message = f"data worker {number} ({describe_worker(worker)}) {late}"
            self._message += ": its stack is printed above, unless it hangs before it can run Python"
            time.sleep(1.0)
            worker.kill()
        elif reader is not None:
            self._message = f"a data worker could not be started within {FIRST_BATCH:.0f} s"
            for process in psutil.Process().children():
                with suppress(psutil.Error):
                    if any("multiprocessing.forkserver" in word for word in process.cmdline()):
                        process.kill()


def describe_worker(worker: Any) -> str:
    """Return the process id and state of a worker, and make it print its stack."""
    try:
        state = psutil.Process(worker.pid).status()
        os.kill(worker.pid, signal.SIGUSR1)
    except (psutil.Error, ProcessLookupError):
        state = "ended"
    return f"pid {worker.pid}, {state}"
