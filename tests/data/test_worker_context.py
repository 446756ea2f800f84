"""Queues and events between a process and its workers: if one of them is killed, the others do not wait forever."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from python_process import PATIENCE
from torch.utils.data import Dataset

from runner.data import DatasetLoader
from runner.data.worker_context import make_context

# Python 3.12 and later warn that torch's threads are not forked; for the other warnings see test_dead_workers.py.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings(r"ignore:unclosed file <_io\.(FileIO|BufferedRandom):ResourceWarning"),
]

SIZE, BATCH = 60, 4


class Locking(Dataset[Any]):
    """Kills the first worker that reads a sample while it holds the lock of its `done_event`, if that has a lock."""

    def __init__(self, died):
        self.died = died

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if not self.died.exists():
            self.died.touch()
            frame = sys._getframe()
            while frame is not None and "done_event" not in frame.f_locals:
                frame = frame.f_back
            assert frame is not None
            if lock := getattr(frame.f_locals["done_event"], "_cond", None):  # as in multiprocessing.Event
                lock.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index], dtype=torch.float32), 0


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_killed_while_it_holds_a_lock_blocks_no_other_process(tmp_path, context):
    data = Locking(tmp_path / "died")
    loader = DatasetLoader(data, BATCH, shuffle=True, num_workers=2, multiprocessing_context=context)
    with pytest.raises(RuntimeError, match=r"data worker \d .* was killed by signal 9 \(Killed\) while it read sample"):
        list(loader)
    batches = [inputs for inputs, _ in loader]
    assert torch.equal(torch.cat(batches).long().sort(dim=0).values, torch.arange(SIZE)[:, None])


def test_workers_killed_while_they_write_a_batch_block_no_thread():
    loader = DatasetLoader(["x" * 300_000] * SIZE, BATCH, shuffle=True, num_workers=2, multiprocessing_context="fork")
    batches: Any = iter(loader)
    failures = []

    def read_rest():
        try:
            list(batches)
        except RuntimeError as error:
            failures.append(str(error))

    next(batches)
    time.sleep(0.5)  # the pipe holds 64 KiB, so a worker waits in the middle of writing a batch
    for worker in batches.workers:
        worker.kill()
        worker.join(PATIENCE)
        assert worker.exitcode == -signal.SIGKILL
    thread = threading.Thread(target=read_rest, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    (message,) = failures
    assert message.count("was killed by signal 9") == 2


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_end_with_their_parent(context):
    program = f"""
import os, signal, time
from runner.data import DatasetLoader
from runner.data.worker_context import make_context

if __name__ == "__main__":
    samples = ["x" * 300_000] * 60
    batches = iter(DatasetLoader(samples, 4, shuffle=True, num_workers=2, multiprocessing_context="{context}"))
    next(batches)
    time.sleep(0.5)  # the workers wait in the middle of writing a batch
    os.kill(os.getpid(), signal.SIGKILL)
"""
    # This returns only after the workers, too, have closed the output.
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr


class Knot:
    """Puts the first item into its queue while both are garbage-collected, as torch's loader does."""

    def __init__(self) -> None:
        self.queue = make_context().Queue()
        self.itself = self

    def __del__(self) -> None:
        self.queue.put(None)
        self.queue.cancel_join_thread()
        self.queue.close()


@pytest.mark.slow
def test_a_collected_queue_closes_each_descriptor_once(monkeypatch: pytest.MonkeyPatch):
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    before = {*threading.enumerate()}
    for _ in range(20):
        Knot()
        gc.collect()
        for thread in {*threading.enumerate()} - before:
            thread.join(PATIENCE)
    assert failed == []
