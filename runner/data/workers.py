"""Read batches in worker processes; when one of them dies, the error names it, its signal and what it was reading."""

from __future__ import annotations

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
from runner.data.sending import send_small_by_value
from runner.data.snapshot import Snapshot
from runner.data.worker_context import make_context
from runner.data.worker_process import WorkerProcess, accept_signals, end_with_parent
from runner.failures.facts import annotate

LOST = 255
"""What multiprocessing gives as the exit code of a worker whose server has died; only the server knew the real one."""

_LESS = "lower num_workers or prefetch_factor"
_REMEDIES = {
    -signal.SIGKILL: f"memory was likely short: {_LESS}",
    -signal.SIGBUS: f"shared memory was likely full: enlarge /dev/shm, or {_LESS}",
}


class BatchKeys:
    """Says which batches are read in an iteration, from `start` on.

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


class WorkerPool:
    """Torch's `DataLoader` and the processes that it has started, none of which outlives this object.

    Args:
        batches: reads the batches.
        keys: which batches are read.
        num_workers: processes that read; 0 reads in this process.
        options: further arguments of the `DataLoader`.
    """

    def __init__(self, batches: SeededBatches, keys: BatchKeys, num_workers: int, options: Mapping[str, Any]) -> None:
        self.batches = batches
        self.keys = keys
        self.num_workers = num_workers
        self.workers: list[Any] = []
        """The processes that read now, by their number."""
        self._options = options
        self._snapshot: Snapshot | None = None
        self._reading = torch.full((num_workers,), -1).share_memory_() if num_workers else torch.empty(0)
        self._make_loader()
        # A garbage collector that takes the loader's queues before the loader would let it wait 5 s for each worker.
        weakref.finalize(self, _kill, self.workers, os.getpid()).atexit = False

    def another(self) -> WorkerPool:
        """Return a pool with workers of its own, for an iteration during which those of this one are busy."""
        return WorkerPool(self.batches, self.keys, self.num_workers, self._options)

    def iterate(self) -> Iterator[Any]:
        """Return an iterator over the keys, read by the workers of the last iteration if these can go on."""
        if self._loader.persistent_workers:
            snapshot = Snapshot(self.batches)
            if self.workers and (snapshot != self._snapshot or any(not worker.is_alive() for worker in self.workers)):
                self.end()  # one has died since its last batch, or they read what is out of date
            self._snapshot = snapshot
        else:
            self.workers.clear()
        try:
            with _deaths_noticed_by_waiting():
                return iter(self._loader)
        finally:
            self.workers[:] = [worker for worker in self.workers if worker.pid is not None]  # the others never started

    def end(self) -> None:
        """Kill the workers; the next iteration starts others."""
        _kill(self.workers, os.getpid())
        for worker in self.workers:
            worker.join(timeout=10)
        self.workers.clear()
        self._make_loader()

    def sample_of(self, number: int) -> int | None:
        """Return the number of the sample that a worker is reading, or was when it died; None if it is not known."""
        sample = int(self._reading[number])
        return sample if sample >= 0 else None

    def _make_loader(self) -> None:
        options = dict(self._options)
        if self.num_workers:
            options.setdefault("persistent_workers", True)
            options["multiprocessing_context"] = make_context(options.get("multiprocessing_context"), self.workers)
        with warnings.catch_warnings():
            # Torch would warn for each loader on each rank, and again at each epoch; ours comes once.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader = DataLoader(
                self.batches,
                batch_size=None,  # one item of SeededBatches is a whole batch
                sampler=self.keys,
                num_workers=self.num_workers,
                collate_fn=_unchanged,
                worker_init_fn=partial(start_worker, options.pop("worker_init_fn", None), self._reading),
                # A separate generator: the default would draw from torch's global one at every epoch.
                generator=torch.Generator().manual_seed(self.batches.seed),
                **options,
            )
        vars(self._loader)["check_worker_number_rationality"] = _say_nothing


class BatchReader(Iterator[Any]):
    """The batches of one epoch, from a given one to the last.

    The death of a worker is noticed when a batch of it is due, at most 5 s later, so the weights are those of a whole
    batch. Any batch can be reached directly and each sample has its own seed: a run that goes on from there reads bit
    for bit the same.

    Args:
        pool: reads the batches.
        epoch: number of the epoch, at least 0.
        batch: number of the first batch within the epoch.
        transforms: whether batches are transformed where they are read.

    Raises:
        RuntimeError: raised by `next()` when a worker has died. If a signal has killed it, the error counts as one of
            the machine.
    """

    def __init__(self, pool: WorkerPool, epoch: int, batch: int, transforms: bool) -> None:
        self._pool = pool
        self._keys = pool.keys
        self._transforms = transforms
        self._epoch = epoch
        self._batch = self._first = batch
        self._source: Iterator[Any] | None = None
        """The loader's iterator, from the first batch on."""
        self._watch: LateWorker | None = None
        """Until each worker has delivered a batch: a watch over them."""

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        try:
            batch = self._read()
        except StopIteration:
            self._source = None
            if self._batch == len(self._keys):
                raise
            self._pool.end()
            raise RuntimeError(
                f"the data set raised StopIteration at batch {self._batch + 1} of epoch {self._epoch + 1}, "
                f"which has {len(self._keys)}: dataset[i] must return a sample for every i below len(dataset)"
            ) from None
        except Exception as error:
            failure = self._explain(error)
            self._source = None
            self._pool.end()
            if failure is None:
                raise
            raise failure from None  # it says what torch says, and more
        self._batch += 1
        if self._watch is not None and self._watch.delivered():
            self._watch = None
        return batch

    @property
    def workers(self) -> list[Any]:
        """The worker processes that read for this iteration now."""
        return self._pool.workers

    @property
    def is_over(self) -> bool:
        """Whether all batches have been delivered, so that another iteration may use the workers."""
        return self._source is None and self._batch == len(self._keys)

    def describe_wait(self) -> str:
        """Return for which batch of which worker this reader waits; that worker prints its stack."""
        batch = f"waits for batch {self._batch + 1} of epoch {self._epoch + 1}"
        if not (workers := self.workers):
            return f"{batch}: data workers are being started" if self._pool.num_workers else batch
        number = (self._batch - self._first) % len(workers)
        return f"{batch} from data worker {number} ({describe_worker(workers[number])})"

    def _read(self) -> Any:
        if self._source is None:
            if self._pool.num_workers:
                self._watch = LateWorker(self, self._pool.num_workers)
            self._keys.start = (self._epoch, self._batch)
            self._keys.transforms = self._transforms
            self._source = self._pool.iterate()
        return next(self._source)

    def _explain(self, error: Exception) -> RuntimeError | None:
        """Return an error that says which worker died, and how; None if `error` has another cause."""
        if self._watch is not None and self._watch.cancel():
            return self._watch.failure()
        # Torch raises one of these three after a death.
        dead = _find_dead(self.workers) if isinstance(error, RuntimeError | OSError | EOFError) else {}
        if not dead:
            return None
        how = " and ".join(f"data worker {number} {self._describe_end(number)}" for number in dead)
        where = f"{how}; batch {self._batch + 1} of epoch {self._epoch + 1} was due"
        codes = [worker.exitcode for worker in dead.values()]
        if any(code >= 0 and code != LOST for code in codes):
            return RuntimeError(f"{where}. It failed, or ended itself; its error, if any, is printed above")
        remedy = next((_REMEDIES[code] for code in codes if code in _REMEDIES), "num_workers=0 shows where it crashes")
        failure = RuntimeError(f"{where}; {remedy}")
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
    """Make a worker end with the process that it reads for, and ignore Ctrl-C, which that process handles.

    Small tensors of a batch are sent by value. The worker notes in `reading`, which is shared, the samples it reads.
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
def _deaths_noticed_by_waiting() -> Iterator[None]:
    """Take back the handler of SIGCHLD that torch installs when its first workers are started.

    It raises in the main thread when a worker has died, between any two lines of Python, even in the middle of an
    optimizer's step. Without it, torch looks after its workers while it waits for a batch.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not before:
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _kill(workers: list[Any], parent: int) -> None:
    if os.getpid() == parent:  # a forked process has a copy of them
        for worker in workers:
            worker.kill()


def _find_dead(workers: list[Any]) -> dict[int, Any]:
    """Return the workers that have ended, by their number."""
    if workers:
        # The files of a dying process are closed, which is what was seen, a moment before it has ended.
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=2)
    for worker in workers:
        if multiprocessing.connection.wait([worker.sentinel], timeout=0):
            worker.join(timeout=10)
    return {number: worker for number, worker in enumerate(workers) if worker.exitcode is not None}


def _say_nothing() -> None:
    pass


def _unchanged(batch: Any) -> Any:
    return batch
