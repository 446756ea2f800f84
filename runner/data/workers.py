"""Read batches in worker processes, which are restarted when one of them dies; no batch is lost or repeated."""

from __future__ import annotations

import logging
import multiprocessing.connection
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from runner.data.late_worker import LateWorker, describe_worker
from runner.data.order import SampleOrder
from runner.data.sending import send_small_by_value
from runner.data.snapshot import Snapshot
from runner.data.torch_workers import deaths_raise, discard, end_with, find_unfinished, hide, kept_iterator, workers_of
from runner.data.worker_process import WorkerProcess, accept_signals, end_with_parent

log = logging.getLogger("runner")

MAX_DEATHS_IN_A_ROW = 3
"""How often workers are restarted for one batch; a sample that kills its reader would do so forever."""
MAX_DEATHS_AN_EPOCH = 10
"""How often workers are restarted in one epoch."""

LOST = 255
"""What multiprocessing gives as the exit code of a worker whose server has died; only the server knew the real one."""

_LESS = "lower num_workers or prefetch_factor"
_REMEDIES = {
    -signal.SIGKILL: f"; memory was likely short: {_LESS}",
    -signal.SIGBUS: f"; shared memory was likely full: enlarge /dev/shm, or {_LESS}",
}


class BatchKeys:
    """Says which batches are read in an iteration, from ``start`` on.

    Yields (epoch, batch, sample numbers, whether to transform) for each.
    """

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self.start: tuple[int, int] = (0, 0)  # (epoch, batch)
        self.transforms = False

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, int, list[int], bool]]:
        epoch, first = self.start
        for number in range(first, len(self.order)):
            yield epoch, number, self.order.indices(epoch, number).tolist(), self.transforms


class BatchReader(Iterator[Any]):
    """The batches of one epoch, from a given one to the last.

    When a worker process dies (the system kills one when memory is short, or a decoder crashes), all of them are
    restarted at the batch that is due. Any batch can be reached directly and each sample has its own seed, so the
    batches are bit for bit the same as without the death.

    Torch reports the death of a worker by raising in the main thread from its handler of SIGCHLD, between any two lines
    of Python, even in the middle of an optimizer's step. Here that handler knows of the workers only during the wait
    for a batch: a death at any other time is found at the next batch.

    Args:
        loader: a ``DataLoader`` whose sampler is ``keys``.
        keys: which batches are read.
        epoch: number of the epoch, at least 0.
        batch: number of the first batch within the epoch.
        transforms: whether batches are transformed where they are read.

    Raises:
        RuntimeError: raised by ``next()`` when workers died too often, or one exited on its own.
    """

    def __init__(self, loader: Any, keys: BatchKeys, epoch: int, batch: int, transforms: bool) -> None:
        self._loader = loader
        self._transforms = transforms
        self._keys = keys
        self._epoch = epoch
        self._batch = self._first = batch
        self._deaths = 0
        self._deaths_in_a_row = 0
        self._source: Any = None
        """The loader's iterator, from the first batch on; None again after a death."""
        self._watch: LateWorker | None = None
        """Until each worker has delivered a batch: a watch over them."""

    def __next__(self) -> Any:
        while self._source is not None or self._batch < len(self._keys):
            try:
                batch = self._read()
            except StopIteration:
                if self._batch < len(self._keys):
                    self._abandon(self._source)
                    raise RuntimeError(
                        f"the data set raised StopIteration at batch {self._batch + 1} of epoch {self._epoch + 1}, "
                        f"which has {len(self._keys)}: dataset[i] must return a sample for every i below len(dataset)"
                    ) from None
                self._source = None
            except Exception as error:
                self._recover(error)
            else:
                self._batch += 1
                self._deaths_in_a_row = 0
                if self._watch is not None and self._watch.delivered():
                    self._watch = None
                return batch
        raise StopIteration

    @property
    def workers(self) -> list[Any]:
        """The worker processes that read for this iteration now."""
        return workers_of(self._source)

    @property
    def is_over(self) -> bool:
        """Whether all batches have been delivered, so that another iteration may use the workers."""
        return self._source is None and self._batch == len(self._keys)

    def describe_wait(self) -> str:
        """Return for which batch of which worker this reader waits; that worker prints its stack."""
        batch = f"waits for batch {self._batch + 1} of epoch {self._epoch + 1}"
        if not (workers := self.workers):
            return f"{batch}: data workers are being started" if self._loader.num_workers else batch
        number = (self._batch - self._first) % len(workers)
        return f"{batch} from data worker {number} ({describe_worker(workers[number])})"

    def _read(self) -> Any:
        if self._source is None:
            self._start()
        source: Any = self._source
        with deaths_raise(workers_of(source)):
            return next(source)

    def _start(self) -> None:
        """Begin to iterate over the loader, at the batch that is due."""
        kept = kept_iterator(self._loader)
        snapshot = Snapshot(self._loader.dataset) if self._loader.persistent_workers else None
        if kept is not None and (kept.snapshot != snapshot or any(not one.is_alive() for one in workers_of(kept))):
            self._abandon(kept)  # a worker died after its last batch, or reads what is out of date
        if self._loader.num_workers:
            self._watch = LateWorker(self, self._loader.num_workers)
        self._keys.start = (self._epoch, self._batch)
        self._keys.transforms = self._transforms
        # Workers that persist may die while torch waits for them to be ready again.
        self._first = self._batch
        with deaths_raise(workers_of(kept_iterator(self._loader))):
            self._source = iter(self._loader)  # stored immediately: until it is hidden, torch may raise at any line
        self._source.snapshot = snapshot
        if hide(self._source):  # its workers were started just now
            end_with(self._loader if self._loader.persistent_workers else self, self._source)

    def _recover(self, error: Exception) -> None:
        """Prepare to read the batch that is due again; raise if no death explains `error`, or after too many."""
        watch, self._watch = self._watch, None
        # Torch raises one of these three after a death.
        by_torch = isinstance(error, RuntimeError | OSError | EOFError)
        candidates = self._source, kept_iterator(self._loader), find_unfinished(error)
        source = next((one for one in candidates if one is not None), None)
        dead = _find_dead(workers_of(source)) if by_torch else {}
        how = " and ".join(f"data worker {number} {_describe_end(worker)}" for number, worker in dead.items())
        self._abandon(source)
        if watch is not None and watch.cancel():
            raise watch.failure() from error
        if not how:
            raise error
        # Its frames hold files that torch opened to test the limit of open files; new workers would inherit them.
        traceback.clear_frames(error.__traceback__)
        if self._batch == len(self._keys):
            return  # all batches have been delivered
        self._deaths += 1
        self._deaths_in_a_row += 1
        where = f"{how}, while batch {self._batch + 1} of epoch {self._epoch + 1} was due"
        if any(worker.exitcode >= 0 and worker.exitcode != LOST for worker in dead.values()):
            raise RuntimeError(f"{where}: it failed, or ended itself; its error, if any, is printed above") from error
        if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW or self._deaths > MAX_DEATHS_AN_EPOCH:
            ahead = self._loader.num_workers * self._loader.prefetch_factor
            raise RuntimeError(
                f"{where} and up to {ahead} were being read: death {self._deaths} in this epoch, "
                f"{self._deaths_in_a_row} without a batch in between. If memory is short, {_LESS}; a run with "
                "num_workers=0 shows whether a sample crashes the process that reads it"
            ) from error
        remedy = next((_REMEDIES[one.exitcode] for one in dead.values() if one.exitcode in _REMEDIES), "")
        log.warning("%s: restarting all workers there; no batch is lost or repeated%s", where, remedy)

    def _abandon(self, source: Any) -> None:
        """Kill the workers of an iterator that are left, and make the loader forget it."""
        # Torch's own shutdown would wait for locks that a killed worker may have held.
        discard(self._loader, source)
        for worker in workers_of(source):
            worker.kill()
        for worker in workers_of(source):
            worker.join(timeout=10)
        self._source = None


def start_worker(worker_init_fn: Callable[[int], None] | None, number: int) -> None:
    """Make a worker end with the process that it reads for, and ignore Ctrl-C, which that process handles.

    Small tensors of a batch are sent by value.
    """
    send_small_by_value()
    if not isinstance(multiprocessing.current_process(), WorkerProcess):
        accept_signals()
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    if worker_init_fn is not None:
        worker_init_fn(number)


def _find_dead(workers: list[Any]) -> dict[int, Any]:
    """Return the workers that have ended, by their number."""
    if workers:
        # The files of a dying process are closed, which is what was seen, a moment before it has ended.
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=2)
    for worker in workers:
        if multiprocessing.connection.wait([worker.sentinel], timeout=0):
            worker.join(timeout=10)
    return {number: worker for number, worker in enumerate(workers) if worker.exitcode is not None}


def _describe_end(worker: Any) -> str:
    code = worker.exitcode
    if code == LOST:
        return f"(pid {worker.pid}) was lost, with the process that starts data workers"
    end = f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
    return f"(pid {worker.pid}) {end}"
