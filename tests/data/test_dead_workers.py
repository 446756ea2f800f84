"""Worker processes that die: killed at any moment, they are started anew, and the run is the same to the bit."""

import gc
import logging
import multiprocessing
import os
import random
import re
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from python_process import PATIENCE
from tiers import one_in
from torch import nn
from torch._C import _set_worker_pids
from torch.utils.data import Dataset, _utils, dataloader
from torch.utils.data._utils import signal_handling

from runner import Callback, ClassificationModel, Trainer
from runner.data import DatasetLoader

# Forked workers need not import this file; Python 3.12 and later warn that torch's threads are not forked along.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Where torch raises while a connection to a worker is made, its socket is left to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    # So is an empty file, by which torch sees then whether any more can be opened, where that is while it is made.
    pytest.mark.filterwarnings(r"ignore:unclosed file <_io\.(FileIO|BufferedRandom):ResourceWarning"),
    pytest.mark.usefixtures("no_process_left"),
]

SIZE, BATCH = 60, 4
BATCHES = SIZE // BATCH


@pytest.fixture
def no_process_left():
    """Fails a test that leaves a worker running."""
    before = {*multiprocessing.active_children()}
    yield
    gc.collect()
    assert {*multiprocessing.active_children()} <= before


class Noisy(Dataset):
    """Samples that are drawn anew in each epoch: what is read twice, or not where it was due, changes the numbers."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.randn(8) + index, index % 3


class WatchedLoader(DatasetLoader):
    """Remembers its last iterator, as long as somebody reads from it."""

    _reader: Any = staticmethod(lambda: None)

    def __iter__(self):
        reader = super().__iter__()
        self._reader = weakref.ref(reader)
        return reader

    @property
    def workers(self) -> Any:
        """The processes that read for this loader now."""
        source = getattr(self._reader(), "_source", None) or self._loader._iterator
        return getattr(source, "_workers", [])


def make_loader(dataset=None, **options):
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    return WatchedLoader(dataset or Noisy(), BATCH, shuffle=True, seed=3, **options)


@pytest.fixture
def patient_torch(monkeypatch):
    """Torch, which looks after its workers and waits for them for five seconds at a time, does so for ten minutes.

    Whatever is left to it makes the test time out, on a machine of any speed.
    """
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 600.0)
    iterator = dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(iterator._try_get_data, "__defaults__", (600.0,))


def contents(batches):
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in batches]


def alone():
    return contents(make_loader(num_workers=0, multiprocessing_context=None))


def kill(loader, worker=0, number=signal.SIGKILL):
    """Kill a worker and wait for its end."""
    victim = loader.workers[worker]
    os.kill(victim.pid, number)
    victim.join(PATIENCE)
    assert victim.exitcode == -number


class KillAt(Callback):
    """Kills a worker at an event of some batches, then runs Python, in which torch's handler of SIGCHLD would raise."""

    def __init__(self, loader, event, batches):
        self.loader, self.batches = loader, batches
        self.losses = []
        self.killed = 0
        setattr(self, event, self.strike)

    def strike(self, state, logger):
        batch = len(self.losses)
        if batch in self.batches:
            self.batches = self.batches - {batch}
            kill(self.loader, worker=batch % 2)
            self.killed += 1
            deadline = time.monotonic() + 0.01
            while time.monotonic() < deadline:
                pass

    def batch_end(self, state, logger):
        self.losses.append(state.total_loss.item())


def train(folder, event="batch_start", batches=frozenset(), **options):
    """The losses of two epochs, the final weights, and how many workers were killed."""
    loader = make_loader(**options)
    torch.manual_seed(0)
    model = ClassificationModel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)), 3)
    killer = KillAt(loader, event, frozenset(batches))
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        max_duration="2ep",
        callbacks=[killer],
        device="cpu",
        run_dir=folder,
    ) as trainer:
        trainer.fit()
    return killer.losses, [p.tolist() for p in model.parameters()], killer.killed


@pytest.mark.slow
@pytest.mark.usefixtures("patient_torch")
def test_workers_of_a_loader_in_a_cycle_of_references_end_at_once():
    for persistent in (False, True):
        loader = make_loader(persistent_workers=persistent)
        cycle: list[Any] = [loader, iter(loader)]
        cycle.append(cycle)
        del loader
        next(cycle[1])
        del cycle
        gc.collect()
        assert multiprocessing.active_children() == []


def restarts(caplog):
    return [record.getMessage() for record in caplog.records if "restarting all workers" in record.getMessage()]


@pytest.mark.parametrize(
    ("event", "persistent"),
    [
        *(("before_forward", False), ("batch_start", True)),
        *(
            pytest.param(event, persistent, marks=pytest.mark.slow)
            for event, persistent in (
                *(("before_dataloader", False), ("before_dataloader", True), ("before_forward", True)),
                *(("after_train_batch", False), ("after_train_batch", True), ("batch_start", False)),
            )
        ),
    ],
)
def test_a_run_whose_workers_are_killed_is_the_same_to_the_bit(tmp_path, caplog, event, persistent):
    undisturbed = train(tmp_path, num_workers=0, multiprocessing_context=None)
    batches = {0, 1, 7, BATCHES - 1, BATCHES + 2}
    batches -= {0} if event == "before_dataloader" else set()  # no worker has been started there
    disturbed = train(tmp_path, event, frozenset(batches), persistent_workers=persistent)
    assert disturbed[:2] == undisturbed[:2]
    assert disturbed[2] == len(batches)
    # A death after the last batch of an epoch costs nothing.
    assert len(restarts(caplog)) == len(batches) - (event != "before_dataloader")


def test_the_log_says_which_worker_died_when_and_what_to_do(caplog):
    loader = make_loader()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    pid = loader.workers[1].pid
    kill(loader, worker=1)
    next(batches)
    (message,) = restarts(caplog)
    assert message.startswith(
        f"data worker 1 (pid {pid}) was killed by signal 9 (Killed), while batch 4 of epoch 1 was due:"
    )
    assert message.endswith("memory was likely short: lower num_workers or prefetch_factor")
    assert caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize("pause", [0.0, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.001, 0.003))])
def test_deaths_at_random_moments_change_nothing(pause):
    """Killed from a thread, so also while the main thread waits, unpickles, or shuts workers down."""

    class Slow(Noisy):
        def __getitem__(self, index):
            time.sleep(pause)
            return super().__getitem__(index)

    expected = alone()
    draw = random.Random(pause)
    for _ in range(4):
        loader = make_loader(Slow(), prefetch_factor=draw.choice([1, 2, 4]))
        done = threading.Event()

        def strike(loader=loader, done=done):
            for _ in range(3):
                if done.wait(draw.uniform(0.005, 0.08)):
                    return
                for worker in loader.workers[:1]:
                    worker.kill()

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            assert contents(loader) == expected
        finally:
            done.set()
            thread.join()


@pytest.mark.usefixtures("patient_torch")
def test_a_worker_killed_while_it_reads_is_noticed_at_once(tmp_path):
    class DiesOnce(Noisy):
        def __getitem__(self, index):
            if not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    assert contents(make_loader(DiesOnce())) == alone()


@pytest.mark.parametrize("worker_count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sample_that_kills_whoever_reads_it_ends_the_run_after_four_deaths(caplog, worker_count):
    class Deadly(Noisy):
        def __getitem__(self, index):
            if index == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    batch = 5
    loader = make_loader(Deadly(), num_workers=worker_count)
    last = int(loader.order.indices(0, batch)[-1])
    read = []
    with pytest.raises(RuntimeError) as caught:
        read.extend(contents([one]) for one in loader)
    assert len(read) <= batch
    assert [one for (one,) in read] == alone()[: len(read)]
    note = str(caught.value)
    ahead = 2 * worker_count  # so many are read at a time: whoever reads the sample dies before its batch is due
    assert f"while batch {len(read) + 1} of epoch 1 was due and up to {ahead} were being read" in note
    assert len(read) + ahead > batch
    assert "4 without a batch in between" in note
    assert "num_workers=0 shows whether a sample crashes" in note
    assert len(restarts(caplog)) <= 10


@pytest.mark.slow
def test_deaths_in_an_epoch_are_bounded(caplog):
    loader = make_loader()
    read = 0
    with pytest.raises(RuntimeError) as caught:
        for _ in loader:
            read += 1
            kill(loader)
    assert read == 11
    assert "death 11 in this epoch, 1 without a batch in between" in str(caught.value)
    assert len(restarts(caplog)) == 10
    assert contents(loader)  # the next epoch starts to count anew
    assert len(restarts(caplog)) == 10


def test_a_worker_that_ends_by_itself_is_not_started_again(caplog):
    class Exits(Noisy):
        def __getitem__(self, index):
            os._exit(3)

    with pytest.raises(RuntimeError) as caught:
        list(make_loader(Exits()))
    assert re.search(r"ended with exit code 3, while batch 1 of epoch 1 was due", str(caught.value))
    assert restarts(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize("unseen", [False, True], ids=["seen", "before torch looks"])
def test_a_worker_killed_while_it_starts_is_started_again(tmp_path, caplog, monkeypatch, unseen):
    def die_once(number):
        if number == 1 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def tell_torch(key, pids):
        for worker in multiprocessing.active_children():
            worker.join(timeout=5 if worker.pid == pids[1] and not (tmp_path / "told").exists() else 0)
        (tmp_path / "told").touch()
        _set_worker_pids(key, pids)

    if unseen:
        monkeypatch.setattr(signal_handling, "_set_worker_pids", tell_torch)
    assert contents(make_loader(worker_init_fn=die_once)) == alone()
    (message,) = restarts(caplog)
    # Worker 0 may have read its first batch by then.
    assert re.match(r"data worker 1 \(pid \d+\) was killed by signal 9 \(Killed\), while batch [12] of", message)
    assert (tmp_path / "told").exists() == unseen


def test_a_worker_that_ends_by_itself_while_it_starts_leaves_no_other_behind(tmp_path):
    def leave(number):
        if number == 1:
            os._exit(3)

    with pytest.raises(RuntimeError, match="data worker 1 .* ended with exit code 3") as caught:
        list(make_loader(worker_init_fn=leave))
    assert multiprocessing.active_children() == [], caught  # whose trace is still there, and holds the others


@pytest.mark.parametrize("kind", [pytest.param(ValueError, marks=pytest.mark.slow), OSError])
@pytest.mark.parametrize("persistent", one_in(2, [True, False]))
@pytest.mark.usefixtures("patient_torch")
def test_an_error_while_workers_start_leaves_none_behind(persistent, kind):
    def refuse(number):
        raise kind("no such disk")

    with pytest.raises(kind, match="no such disk") as caught:
        list(make_loader(worker_init_fn=refuse, persistent_workers=persistent))
    assert multiprocessing.active_children() == [], caught  # whose trace is still there, and holds them
    del caught
    gc.collect()


@pytest.mark.usefixtures("patient_torch")
def test_a_persistent_worker_killed_between_epochs_is_started_again():
    loader = make_loader(persistent_workers=True)
    reference = make_loader(num_workers=0, multiprocessing_context=None)
    expected = [contents(reference) for _ in range(3)]
    epochs = []
    for _ in range(3):
        epochs.append(contents(loader))
        kill(loader, worker=1)
    assert epochs == expected


@pytest.mark.usefixtures("patient_torch")
def test_a_persistent_worker_killed_before_it_is_ready_for_an_epoch_is_noticed_at_once():
    loader = make_loader(persistent_workers=True)
    reference = make_loader(num_workers=0, multiprocessing_context=None)
    expected = [contents(reference) for _ in range(2)]
    first = contents(loader)
    worker = loader.workers[1]
    os.kill(worker.pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (worker.pid, signal.SIGKILL))
    timer.start()
    assert [first, contents(loader)] == expected
    timer.join()


@pytest.mark.slow
def test_deaths_leave_no_process_thread_or_file_open():
    def open_files():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def read():
        loader = make_loader()
        for number, _ in enumerate(loader):
            if number in (2, 5, 9):
                kill(loader)

    read()  # what is opened once stays open
    before = open_files()
    for _ in range(4):
        read()
    deadline = time.monotonic() + PATIENCE
    while (after := open_files()) > before and time.monotonic() < deadline:
        time.sleep(0.05)  # threads that fed a queue end, and close it, a moment after it
    files, threads = after
    assert files < before[0] + 12  # as many deaths
    assert threads <= before[1]


def test_ctrl_c_in_a_terminal_does_not_reach_workers():
    loader = make_loader()
    batches = iter(loader)
    first = [next(batches) for _ in loader.workers]  # one from each, so that all have started
    for worker in loader.workers:
        os.kill(worker.pid, signal.SIGINT)
    time.sleep(0.05)
    assert all(worker.is_alive() for worker in loader.workers)
    assert contents([*first, *batches]) == alone()


@pytest.mark.parametrize("num_workers", one_in(2, [2, 0]))
@pytest.mark.parametrize("part", ["dataset", "collate_fn"])
def test_an_error_of_the_data_set_is_raised_once_and_says_where(caplog, num_workers, part):
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
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "while batch 3 of epoch 2 was read" in told
    assert (f"raised by dataset[{bad}]" in told) == (part == "dataset")
    if num_workers:
        assert "in __getitem__" in told  # the worker's own trace
    assert restarts(caplog) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_cannot_end_an_epoch_early_by_stop_iteration(num_workers):
    class Short(Noisy):
        def __getitem__(self, index):
            raise StopIteration

    context = "fork" if num_workers else None
    with pytest.raises(RuntimeError, match="raised StopIteration at batch 1 of epoch 1, which has 15"):
        list(make_loader(Short(), num_workers=num_workers, multiprocessing_context=context))


def test_workers_of_one_rank_killed_change_no_rank(run_ranks, tmp_path):
    def program():
        import os
        import signal
        import sys
        from typing import Any

        import torch

        from runner import Callback, ClassificationModel, Trainer
        from runner.data import DatasetLoader

        class Noisy(torch.utils.data.Dataset):
            def __len__(self):
                return 160  # so many that none has read all of an epoch when it is killed at its second batch

            def __getitem__(self, index):
                return torch.randn(8) + index, index % 3

        class Kill(Callback):
            def __init__(self, batches):
                self.batches, self.losses = batches, []

            def before_forward(self, state, logger):
                if state.timestamp.batch in self.batches and os.environ["RANK"] == "1":
                    os.kill(loader.reader._source._workers[0].pid, signal.SIGKILL)
                self.losses.append(state.batch[0].sum().item())

        class WatchedLoader(DatasetLoader):
            def __iter__(self):
                self.reader: Any = super().__iter__()
                return self.reader

        for batches in ([], [1, 21]):
            loader = WatchedLoader(Noisy(), 8, shuffle=True, num_workers=2, multiprocessing_context="fork")
            torch.manual_seed(0)
            model = ClassificationModel(torch.nn.Linear(8, 3), 3)
            kill = Kill(batches)
            with Trainer(
                model=model,
                train_dataloader=loader,
                optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                max_duration="2ep",
                callbacks=[kill],
                device="cpu",
                run_dir="run",
            ) as trainer:
                trainer.fit()
            print(kill.losses, [p.tolist() for p in model.parameters()])
        sys.stdout.flush()

    for rank, finished in enumerate(run_ranks(program)):
        undisturbed, disturbed = finished.stdout.splitlines()
        assert undisturbed == disturbed
        assert finished.stderr.count("restarting all workers") == (2 if rank == 1 else 0)
