"""A watch over progress: if all ranks stand still, the run reports where, and ends."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from runner.distributed.endings import end_abruptly
from runner.failures.exit_codes import ENVIRONMENT_FAILED
from runner.failures.tracebacks import is_of_user

STACKS = "stacks"
"""Subfolder of a run's folder for the stacks of its ranks."""
MOST_POLL = 5.0  # maximum seconds between two checks
BUSY = 0.01  # share of time that a working thread has a core, even on a crowded machine
PARTING = 10.0  # seconds that rank 0 waits until all ranks have written their stacks

_run: weakref.ref[Any] | None = None


def watch_run(run: Any) -> None:
    """From now on, measure progress by the timestamps of this run's state, which change with each batch."""
    global _run
    _run = weakref.ref(run)


@contextmanager
def ended_when_stuck(patience: float, folder: Path, device: str) -> Iterator[None]:
    """Within the context, end this process with exit code 75 after `patience` seconds without progress on any rank.

    A rank makes no progress if no batch ends, its main thread stays at the same place and does not use its core, and,
    in a single process, it waits for data workers. A message then names the place of each rank, and the stacks of all
    threads go to the folder `stacks` in `folder`. If all ranks wait that long for something else, such as a program
    that a callback runs, increase the patience. All ranks.

    Args:
        patience: seconds; infinity for no watch.
        folder: the run's folder.
        device: the training device; CPU time is ignored on a GPU, because a thread that waits for one keeps its core
            busy.
    """
    if patience == float("inf") or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(patience, folder, counts_cpu="cuda" not in device)
    watch.start()
    try:
        yield
    finally:
        watch.over.set()
        watch.join()


class _Watch(threading.Thread):
    def __init__(self, patience: float, folder: Path, counts_cpu: bool) -> None:
        super().__init__(name="standstill", daemon=True)
        self.over = threading.Event()
        self._patience = patience
        self._folder = folder
        self._counts_cpu = counts_cpu
        self._main = threading.get_ident()
        self._rank = int(os.environ.get("RANK", "0"))
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Any = None
        self._name = ""
        if self._ranks > 1:
            from runner.distributed.store import current_store, job_key  # imports torch

            store: Any = current_store()
            self._store = store.clone()  # a connection of its own
            self._name = job_key("standstill")

    def run(self) -> None:
        poll = min(MOST_POLL, self._patience / 10)
        last_place: Any = None
        since = last_cpu = 0.0
        is_reported = False
        while not self.over.wait(poll):
            now = time.monotonic()
            frames = _frames_of(self._main)
            cpu = _cpu_time(self._main) if self._counts_cpu else 0.0
            place = _times(), [(frame.f_code, frame.f_lasti) for frame in frames[: _index_of_wait(frames) + 1]]
            if place != last_place or cpu - last_cpu > BUSY * poll:
                last_place = place
                since = now
                if is_reported:
                    self._report("")
                is_reported = False
            elif now - since >= self._patience:
                description = describe(frames)
                if self._store is None:
                    if "data worker" in description:
                        self._end({0: description}, now - since)
                    continue
                if not is_reported:
                    self._report(description)
                    is_reported = True
                with suppress(RuntimeError):  # the host of the store has ended, and other ranks notice it too
                    self._end_together(now - since)
            last_cpu = cpu
            del frames

    def _report(self, description: str) -> None:
        with suppress(RuntimeError):
            self._store.set(f"{self._name}/{self._rank}", description)

    def _end_together(self, seconds: float) -> None:
        """End this rank if all ranks stand still; rank 0 decides, and prints the message."""
        over = f"{self._name}/over"
        if self._rank == 0:
            keys = [f"{self._name}/{rank}" for rank in range(self._ranks)]
            places = [self._store.get(key).decode() for key in keys] if self._store.check(keys) else [""]
            if all(places):
                self._store.set(over, json.dumps(places))
                self._end(dict(enumerate(places)), seconds)
        elif self._store.check([over]):
            self._write_stacks()
            self._store.set(f"{over}/{self._rank}", "written")
            time.sleep(PARTING)  # rank 0 ends this process, or its launcher does
            os._exit(ENVIRONMENT_FAILED)

    def _end(self, places: dict[int, str], seconds: float) -> None:
        self._write_stacks()
        keys = [f"{self._name}/over/{rank}" for rank in places if rank]
        deadline = time.monotonic() + PARTING
        while keys and not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.1)
        waits = "; ".join(f"rank {rank} {description}" for rank, description in places.items())
        end_abruptly(
            ENVIRONMENT_FAILED,
            f"ERROR: nothing has moved for {seconds:.0f} s (launch.patience): {waits}. Stacks of all ranks are in "
            f"{self._folder / STACKS}. Resume the run from its last checkpoint",
        )

    def _write_stacks(self) -> None:
        with suppress(OSError):
            (self._folder / STACKS).mkdir(parents=True, exist_ok=True)
            with (self._folder / STACKS / f"rank{self._rank}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)


def _times() -> Any:
    run = None if _run is None else _run()
    state = getattr(run, "state", None)
    return None if state is None else (state.timestamp, state.eval_timestamp, state.predict_timestamp)


def _frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the outermost first."""
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _cpu_time(thread: int) -> float:
    clock = getattr(time, "pthread_getcpuclockid", None)  # not on every system
    return time.clock_gettime(clock(thread)) if clock is not None else 0.0


def _describe_wait(code: CodeType) -> str:
    """Return what one of torch's functions waits for; an empty string for other functions."""
    file = code.co_filename.replace(os.sep, "/")
    if file.endswith("/torch/distributed/distributed_c10d.py"):
        return f"waits for other ranks in {code.co_name}"
    if file.endswith("/torch/utils/data/dataloader.py"):
        return "waits for a batch of a data worker"
    if file.endswith("/torch/autograd/graph.py") and code.co_name == "_engine_run_backward":
        return "is in a backward pass, in which ranks average gradients"
    return ""


def _index_of_wait(frames: list[FrameType]) -> int:
    """Return the index of the outermost waiting frame, in which polling is no progress, or of the last frame."""
    return next((index for index, frame in enumerate(frames) if _describe_wait(frame.f_code)), len(frames) - 1)


def describe(frames: list[FrameType]) -> str:
    """Return a rank's current event and place in the code, and what it waits for.

    Args:
        frames: frames of its main thread, the outermost first.
    """
    if not frames:
        return "has ended"
    firing = [frame for frame in frames if frame.f_code.co_name == "fire" and "event" in frame.f_locals]
    event = f" at {firing[-1].f_locals['event'].name}" if firing else ""
    last = frames[_index_of_wait(frames)]
    wait = _describe_wait(last.f_code)
    readers = [frame.f_locals["self"] for frame in frames if frame.f_code.co_qualname == "BatchReader._read"]
    if readers:
        wait = readers[-1].describe_wait()
    frame = next((frame for frame in reversed(frames) if is_of_user(frame.f_code.co_filename)), last)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
    return f"{wait}{event} ({place})" if wait else f"is{event} at {place}"
