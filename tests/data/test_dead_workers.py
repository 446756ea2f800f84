"""Worker processes that die: an error names the worker, its signal and its sample, and the run can go on."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from python_process import PATIENCE
from tiers import fast
from torch.utils.data import Dataset

from runner.data import DatasetLoader
from runner.failures.facts import is_of_environment

# Forked workers need not import this file; Python 3.12 and later warn that torch's threads are not forked.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # If torch raises while it connects to a worker, the socket is left to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    # So is an empty file, which torch then opens to check whether any more files can be opened.
    pytest.mark.filterwarnings(r"ignore:unclosed file <_io\.(FileIO|BufferedRandom):ResourceWarning"),
    pytest.mark.usefixtures("no_process_left"),
]

SIZE, BATCH = 60, 4
BATCHES = SIZE // BATCH


@pytest.fixture
def no_process_left():
    """Fail a test that leaves a worker running."""
    before = {*multiprocessing.active_children()}
    yield
    gc.collect()
    assert {*multiprocessing.active_children()} <= before


class Noisy(Dataset):
    """Samples are drawn anew in each epoch: reading one twice, or in the wrong batch, changes the numbers."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.randn(8) + index, index % 3


def make_loader(dataset=None, **options):
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    return DatasetLoader(dataset or Noisy(), BATCH, shuffle=True, seed=3, **options)


def contents(batches):
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in batches]


def read_without_workers():
    """Return the batches of the first epoch, read in this process."""
    return contents(make_loader(num_workers=0, multiprocessing_context=None))


def kill(batches, worker=0, number=signal.SIGKILL):
    """Kill a worker and wait for its end."""
    victim = batches.workers[worker]
    os.kill(victim.pid, number)
    victim.join(PATIENCE)
    assert victim.exitcode == -number


@pytest.mark.slow
def test_workers_of_a_loader_in_a_cycle_of_references_end_at_once(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 100.0)  # torch's patience with a worker
    for persistent in (False, True):
        loader = make_loader(persistent_workers=persistent)
        cycle: list[Any] = [loader, iter(loader)]
        cycle.append(cycle)
        del loader
        next(cycle[1])
        start_time = time.monotonic()
        del cycle
        gc.collect()
        assert multiprocessing.active_children() == []
        assert time.monotonic() - start_time < 90


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", fast([0, 7], 0))
def test_the_next_batch_of_a_dead_worker_is_an_error_after_which_the_rest_can_be_read(context, number):
    loader = make_loader(multiprocessing_context=context, prefetch_factor=1)
    batches = iter(loader)
    read = [next(batches) for _ in range(number + 1)]
    kill(batches, worker=1)
    deadline = time.monotonic() + 0.01
    while time.monotonic() < deadline:  # torch's handler of SIGCHLD would raise here
        pass
    pid = batches.workers[1].pid
    with pytest.raises(RuntimeError) as caught:
        read.extend(batches)
    assert contents(read) == read_without_workers()[: len(read)] and len(read) < BATCHES
    message = str(caught.value)
    assert message.startswith(f"data worker 1 (pid {pid}) was killed by signal 9 (Killed)")
    assert f"; batch {len(read) + 1} of epoch 1 was due" in message
    assert message.endswith("memory was likely short: lower num_workers or prefetch_factor")
    assert is_of_environment(caught.value)
    loader.seek(0, len(read))
    assert contents([*read, *loader]) == read_without_workers()


def test_the_death_of_a_worker_after_the_last_batch_is_no_error():
    loader = make_loader(persistent_workers=False)
    batches = iter(loader)
    read = [next(batches) for _ in range(BATCHES)]
    kill(batches)
    assert contents([*read, *batches]) == read_without_workers()


@pytest.mark.parametrize("kind", fast(["samples", "batches"], "samples"))
@pytest.mark.parametrize("worker_count", fast([1, 3], 1))
def test_an_error_names_the_sample_that_killed_its_worker(worker_count, kind):
    class Deadly(Noisy):
        def __getitem__(self, index):
            if index == last:
                os.kill(os.getpid(), signal.SIGSEGV)
            return super().__getitem__(index)

    class DeadlyBatches(Noisy):
        def read_batch(self, indices):
            return torch.stack([Deadly()[index][0] for index in indices])

    batch = 5
    loader = make_loader(Deadly() if kind == "samples" else DeadlyBatches(), num_workers=worker_count)
    last = int(loader.order.indices(0, batch)[-1])
    with pytest.raises(RuntimeError) as caught:
        for number, _ in enumerate(loader):
            assert number < batch
    message = str(caught.value)
    assert "was killed by signal 11 (Segmentation fault)" in message
    assert f" while it read sample {last}; batch " in message or kind == "batches"
    assert message.endswith("; num_workers=0 shows where it crashes")


def test_the_handler_of_sigchld_is_restored():
    before = signal.getsignal(signal.SIGCHLD)
    list(make_loader())
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.slow
def test_a_worker_that_exits_at_its_start_ends_the_others(tmp_path):
    def leave(number):
        if number == 1:
            os._exit(3)

    with pytest.raises(RuntimeError, match=r"data worker 1 .* ended with exit code 3; batch [12] of") as caught:
        list(make_loader(worker_init_fn=leave))
    assert multiprocessing.active_children() == [], caught  # the traceback still refers to the other workers


@pytest.mark.parametrize("kind", [pytest.param(ValueError, marks=pytest.mark.slow), OSError])
@pytest.mark.parametrize("persistent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_error_at_the_start_of_workers_leaves_no_worker(persistent, kind):
    def refuse(number):
        raise kind("no such disk")

    with pytest.raises(kind, match="no such disk") as caught:
        list(make_loader(worker_init_fn=refuse, persistent_workers=persistent))
    assert multiprocessing.active_children() == [], caught  # the traceback still refers to the workers
    del caught
    gc.collect()


def test_a_persistent_worker_killed_between_epochs_is_restarted():
    loader = make_loader(persistent_workers=True)
    reference = make_loader(num_workers=0, multiprocessing_context=None)
    expected = [contents(reference) for _ in range(3)]
    epochs = []
    for _ in range(3):
        batches = iter(loader)
        epochs.append(contents(batches))
        kill(batches, worker=1)
    assert epochs == expected


@pytest.mark.slow
def test_dead_workers_leave_no_process_thread_or_open_file():
    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def read():
        loader = make_loader()
        for number in (2, 5, 9):
            loader.seek(0, number)
            batches = iter(loader)
            next(batches)
            kill(batches)
            with pytest.raises(RuntimeError, match="was killed"):
                list(batches)

    read()  # some files are opened once and stay open
    before = open_files()
    for _ in range(4):
        read()
    deadline = time.monotonic() + PATIENCE
    while (after := open_files()) > before and time.monotonic() < deadline:
        time.sleep(0.05)  # the thread that feeds a queue closes its files a little later
    files, threads = after
    assert files < before[0] + 12  # the number of deaths
    assert threads <= before[1]


def test_ctrl_c_in_a_terminal_does_not_reach_workers():
    loader = make_loader()
    batches = iter(loader)
    first = [next(batches) for _ in range(2)]  # a batch from each worker, so that both have started
    for worker in batches.workers:
        os.kill(worker.pid, signal.SIGINT)
    time.sleep(0.05)
    assert all(worker.is_alive() for worker in batches.workers)
    assert contents([*first, *batches]) == read_without_workers()


@pytest.mark.parametrize("num_workers", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["dataset", "collate_fn"])
def test_an_error_of_the_data_set_names_its_batch_and_sample(num_workers, part):
    class Broken(Noisy):
        def __getitem__(self, index):
            if part == "dataset" and index == bad:
                raise OSError("cannot be read")
            return super().__getitem__(index)

    def collate(samples):
        if part == "collate_fn" and bad % 3 in [target for _, target in samples]:
            raise OSError("cannot be read")
        return torch.utils.data.default_collate(samples)

    context = "fork" if num_workers else None
    loader = make_loader(Broken(), num_workers=num_workers, multiprocessing_context=context, collate_fn=collate)
    bad = int(loader.order.indices(1, 2)[1])
    loader.seek(1, 2)
    with pytest.raises(OSError, match="cannot be read") as caught:
        list(loader)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "while batch 3 of epoch 2 was read" in text
    assert (f"raised by dataset[{bad}]" in text) == (part == "dataset")
    if num_workers:
        assert "in __getitem__" in text  # the worker's traceback


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stop_iteration_of_a_data_set_cannot_end_an_epoch_early(num_workers):
    class Short(Noisy):
        def __getitem__(self, index):
            raise StopIteration

    context = "fork" if num_workers else None
    with pytest.raises(RuntimeError, match="raised StopIteration at batch 1 of epoch 1, which has 15"):
        list(make_loader(Short(), num_workers=num_workers, multiprocessing_context=context))
