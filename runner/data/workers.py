"""Read batches in worker processes. If a worker dies, the error names it, its signal and the sample it was reading."""

from __future__ import annotations

import copy
import multiprocessing.connection
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from runner.data.late_worker import LateWorker, describe_worker
from runner.data.order import SampleOrder
from runner.data.seeded_batches import SeededBatches
from runner.data.small_tensors import send_small_by_value
from runner.data.snapshot import Snapshot
from runner.data.worker_context import make_context
from runner.data.worker_process import WorkerProcess, accept_signals, end_with_parent
from runner.failures.facts import annotate

LOST = 255
"""Exit code that multiprocessing reports for a worker whose server has died; only the server knew the real one."""

_LESS = "lower num_workers or prefetch_factor"
_REMEDIES = {
    -signal.SIGKILL: f"memory was likely short: {_LESS}",
    -signal.SIGBUS: f"shared memory was likely full: enlarge /dev/shm, or {_LESS}",
}


class BatchKeys:
    """The sampler: yields a key (epoch, batch, sample numbers, whether to transform) for each batch from `start` on."""

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


class WorkerPool:
    """Torch's `DataLoader` and its worker processes, which are killed when this object is freed.

    Args:
        batches: reads the batches.
        keys: says which batches to read.
        num_workers: processes that read; 0 reads in this process.
        options: further arguments of the `DataLoader`.
    """

    def __init__(self, batches: SeededBatches, keys: BatchKeys, num_workers: int, options: Mapping[str, Any]) -> None:
        self.batches = batches
        self.keys = keys
        self.num_workers = num_workers
        self.workers: list[Any] = []
        """The running worker processes, by number."""
        self._options = options
        self._reader: weakref.ref[BatchReader] | None = None
        self._snapshot: Snapshot | None = None
        self._reading = torch.full((num_workers,), -1).share_memory_() if num_workers else torch.empty(0)
        self._make_loader()
        # If the garbage collector freed its queues first, the loader would wait 5 s for each worker.
        weakref.finalize(self, _kill, self.workers, os.getpid()).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}

    def read(self, epoch: int, batch: int, transforms: bool) -> BatchReader:
        """Return a `BatchReader`; while another one is reading, it has a pool of its own, with other workers."""
        last = None if self._reader is None else self._reader()
        if last is not None and not last.is_over:
            pool = WorkerPool(copy.copy(self.batches), copy.copy(self.keys), self.num_workers, self._options)
            return BatchReader(pool, epoch, batch, transforms)
        reader = BatchReader(self, epoch, batch, transforms)
        self._reader = weakref.ref(reader)
        return reader

    def iterate(self) -> Iterator[Any]:
        """Return an iterator over the batches, read by the workers of the last iteration if they are usable."""
        if self._loader.persistent_workers:
            snapshot = Snapshot(self.batches)
            if self.workers and (snapshot != self._snapshot or any(not worker.is_alive() for worker in self.workers)):
                self.end()  # one has died since its last batch, or their data set is out of date
            self._snapshot = snapshot
        else:
            self.workers.clear()
        try:
            with _without_death_signals():
                return iter(self._loader)
        finally:
            self.workers[:] = [
                worker for worker in self.workers if worker.pid is not None
            ]  # torch never started the others

    def end(self) -> None:
        """Kill the workers; the next iteration starts new ones."""
        _kill(self.workers, os.getpid())
        for worker in self.workers:
            worker.join(timeout=10)
        self.workers.clear()
        self._make_loader()

    def sample_of(self, number: int) -> int | None:
        """Return the number of the sample that a worker is reading, or was when it died; None if unknown."""
        sample = int(self._reading[number])
        return sample if sample >= 0 else None

    def _make_loader(self) -> None:
        options = dict(self._options)
        if self.num_workers:
            options.setdefault("persistent_workers", True)
            options["multiprocessing_context"] = make_context(options.get("multiprocessing_context"), self.workers)
        with warnings.catch_warnings():
            # Torch would warn for each loader on each rank and again at each epoch; the runner warns once.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader = DataLoader(
                self.batches,
                batch_size=None,  # one item of SeededBatches is a whole batch
                sampler=self.keys,
                num_workers=self.num_workers,
                collate_fn=_return_unchanged,
                worker_init_fn=partial(start_worker, options.pop("worker_init_fn", None), self._reading),
                # A separate generator: the default would draw from torch's global one at every epoch.
                generator=torch.Generator().manual_seed(self.batches.seed),
                **options,
            )
        vars(self._loader)["check_worker_number_rationality"] = _do_nothing


class BatchReader(Iterator[Any]):
    """An iterator over the batches of one epoch, from batch `batch` to the last.

    A dead worker is noticed when its next batch is due, at most 5 s late. So it raises between batches, and the weights
    are those after a whole step. As any batch can be read directly and each sample has its own seed, a run that
    continues from there reads bit-identical batches.

    Args:
        pool: reads the batches.
        epoch: number of the epoch, at least 0.
        batch: number of the first batch within the epoch.
        transforms: whether the process that reads a batch also transforms it.

    Raises:
        RuntimeError: raised by `next()` when a worker has died. If a signal killed it, the error counts as a failure of
            the machine.
    """

    def __init__(self, pool: WorkerPool, epoch: int, batch: int, transforms: bool) -> None:
        self._pool = pool
        self.keys = pool.keys
        self._transforms = transforms
        self._epoch = epoch
        self._batch = self._first = batch
        self._source: Iterator[Any] | None = None
        """The loader's iterator, from the first batch on."""
        self._watch: LateWorker | None = None
        """Watches the workers until each has delivered a batch; then None."""

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        try:
            batch = self._read()
        except StopIteration:
            self._source = None
            if self._batch == len(self.keys):
                raise
            self._pool.end()
            raise RuntimeError(
                f"the data set raised StopIteration at batch {self._batch + 1} of epoch {self._epoch + 1}, "
                f"which has {len(self.keys)}: dataset[i] must return a sample for every i below len(dataset)"
            ) from None
        except Exception as error:
            failure = self._explain(error)
            self._source = None
            self._pool.end()
            if failure is None:
                raise
            raise failure from None  # it includes what torch says
        self._batch += 1
        if self._watch is not None and self._watch.count_batch():
            self._watch = None
        return batch

    @property
    def workers(self) -> list[Any]:
        """The running worker processes of this iteration, by number."""
        return self._pool.workers

    @property
    def is_over(self) -> bool:
        """Whether all batches have been delivered, so that the workers are free for another iteration."""
        return self._source is None and self._batch == len(self.keys)

    def describe_wait(self) -> str:
        """Describe the batch and the worker that this reader waits for, and make the worker print its stack."""
        batch = f"waits for batch {self._batch + 1} of epoch {self._epoch + 1}"
        if not (workers := self.workers):
            return f"{batch}: data workers are being started" if self._pool.num_workers else batch
        number = (self._batch - self._first) % len(workers)
        return f"{batch} from data worker {number} ({describe_worker(workers[number])})"

    def _read(self) -> Any:
        if self._source is None:
            if self._pool.num_workers:
                self._watch = LateWorker(self, self._pool.num_workers)
            self.keys.start = (self._epoch, self._batch)
            self.keys.transforms = self._transforms
            self._source = self._pool.iterate()
        return next(self._source)

    def _explain(self, error: Exception) -> RuntimeError | None:
        """Return an error that says which worker died and how; None if `error` has another cause."""
        if self._watch is not None and self._watch.cancel():
            return self._watch.failure()
        # Torch raises one of these three when a worker has died.
        dead = _find_dead(self.workers) if isinstance(error, RuntimeError | OSError | EOFError) else {}
        if not dead:
            return None
        deaths = " and ".join(f"data worker {number} {self._describe_end(number)}" for number in dead)
        message = f"{deaths}; batch {self._batch + 1} of epoch {self._epoch + 1} was due"
        codes = [worker.exitcode for worker in dead.values()]
        if any(code >= 0 and code != LOST for code in codes):
            return RuntimeError(f"{message}. It failed, or ended itself; its error, if any, is printed above")
        remedy = next((_REMEDIES[code] for code in codes if code in _REMEDIES), "num_workers=0 shows where it crashes")
        failure = RuntimeError(f"{message}; {remedy}")
        annotate(failure, of_environment=True)
        return failure

    def _describe_end(self, number: int) -> str:
        worker = self.workers[number]
        code = worker.exitcode
        if code == LOST:
            return f"(pid {worker.pid}) was lost, with the process that starts data workers"
        end = f"ended with exit code {code}"
        if code < 0:
            end = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        sample = self._pool.sample_of(number)
        return f"(pid {worker.pid}) {end}" + ("" if sample is None else f" while it read sample {sample}")


def start_worker(worker_init_fn: Callable[[int], None] | None, reading: Tensor, number: int) -> None:
    """Make a worker end with its parent, leave Ctrl-C to the parent, and send small tensors by value.

    It writes the number of the sample that it is reading to its element of `reading`, which is in shared memory.
    """
    send_small_by_value()
    if not isinstance(multiprocessing.current_process(), WorkerProcess):
        accept_signals()
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()
    info: Any = get_worker_info()
    info.dataset.reading = reading.numpy()[number : number + 1]
    if worker_init_fn is not None:
        worker_init_fn(number)


@contextmanager
def _without_death_signals() -> Iterator[None]:
    """Restore the handler of SIGCHLD, which torch replaces when it starts its first workers.

    Torch's handler raises in the main thread as soon as a worker dies, between any two lines of Python, even in the
    middle of an optimizer's step. Without it, torch checks its workers while it waits for a batch.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _kill(workers: list[Any], parent: int) -> None:
    if os.getpid() == parent:  # not in a forked process, which inherits this finalizer
        for worker in workers:
            worker.kill()


def _find_dead(workers: list[Any]) -> dict[int, Any]:
    """Return the workers that have ended, by their number."""
    if workers:
        # A dying process closes its files, which is what the reader noticed, shortly before it has ended.
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=2)
    for worker in workers:
        if multiprocessing.connection.wait([worker.sentinel], timeout=0):
            worker.join(timeout=10)
    return {number: worker for number, worker in enumerate(workers) if worker.exitcode is not None}


def _do_nothing() -> None:
    pass


def _return_unchanged(batch: Any) -> Any:
    return batch
