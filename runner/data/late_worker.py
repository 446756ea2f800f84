"""A watch over data workers until each has delivered its first batch: a worker may hang while it starts."""

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

FIRST_BATCH = 600.0  # seconds that a worker has to start and to read its first batch


class LateWorker:
    """Ends the worker whose first batch is due for too long, once it has printed where it stands.

    Args:
        reader: the `BatchReader` of the workers; a weak reference to it is kept.
        num_workers: workers, of which each delivers every `num_workers`-th batch.
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

    def delivered(self) -> bool:
        """Count a batch; return whether all workers have delivered one, which ends the watch."""
        self._delivered += 1
        is_over = self._delivered == self._num_workers
        if is_over:
            self._timer.cancel()
        return is_over

    def cancel(self) -> bool:
        """End the watch, and return whether it has ended a worker."""
        self._timer.cancel()
        return bool(self._message)

    def failure(self) -> RuntimeError:
        """Return the error to raise for the worker that was ended."""
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
    """Return the process id and the state of a worker, which prints its stack."""
    try:
        state = psutil.Process(worker.pid).status()
        os.kill(worker.pid, signal.SIGUSR1)
    except (psutil.Error, ProcessLookupError):
        state = "ended"
    return f"pid {worker.pid}, {state}"
