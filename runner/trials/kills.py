"""Kills a run in a separate process with SIGKILL, at chosen moments.

The run is observed from outside, through its folder: it has a new line of digests after every batch, and a hidden
folder while a checkpoint is written.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoints.digest import DIGESTS, read_digests
from runner.distributed.environment import PARENT
from runner.failures.tracebacks import environment_of_user

IN_SAVE = "inside a save"
START = "start-up"
EPOCH_END = "end of an epoch"  # when evaluations run, by default
TRAINING = "training"
MOMENTS = (IN_SAVE, START, TRAINING, EPOCH_END)
FILES = 4  # in a checkpoint, written one after another

POLL = 0.001  # seconds between two checks of a run's folder
GRACE = 60.0  # seconds that a run has to end after one of its ranks was killed
LINGER = 5.0  # seconds for processes started by a killed run to exit on their own
TAIL = 4096  # bytes at the end of the file of digests, enough for one whole line


@dataclass(frozen=True)
class PlannedKill:
    """A planned kill of a run.

    Attributes:
        moment: one of `MOMENTS`.
        batch: the batch that must have been trained before the kill, except in start-up.
        fraction: the part of the moment's duration that passes before the kill, in [0, 1).
        rank: the rank whose process is killed; rank 0 if that process has not been started yet.
    """

    moment: str
    batch: int
    fraction: float
    rank: int


@dataclass(frozen=True)
class CompletedKill:
    """A completed kill of a run.

    Attributes:
        moment: one of `MOMENTS`, not always the planned one.
        batch: the last batch trained before the kill.
        rank: the rank whose process was killed.
        resumed_from: the batch of the checkpoint that the run resumes from; 0 if it starts over.
    """

    moment: str
    batch: int
    rank: int
    resumed_from: int = 0


@dataclass(frozen=True)
class RunPace:
    """The pace of a run that was not killed.

    Attributes:
        batches: the number of trained batches.
        epoch_ends: the last batch of every epoch but the last.
        seconds: the lifetime of its process.
        seen: number of each new batch that was observed, with the seconds since the process started.
    """

    batches: int
    epoch_ends: list[int]
    seconds: float
    seen: list[tuple[int, float]]

    @property
    def startup(self) -> float:
        """Seconds from the start of the process to the end of the first batch."""
        return self.seen[0][1] if self.seen else self.seconds

    def pause_after(self, batch: int) -> float:
        """Return the seconds from the end of a batch to the next observed batch."""
        earlier = [seconds for seen, seconds in self.seen if seen <= batch]
        later = [seconds for seen, seconds in self.seen if seen > batch]
        return later[0] - earlier[-1] if earlier and later else 0.0


def plan_kills(number: int, seed: int, pace: RunPace, ranks: int) -> list[PlannedKill]:
    """Return kills at random moments of a run, in the order of their batches.

    Four or more kills cover all kinds of moments; a single kill comes inside a save.
    """
    draw = random.Random(seed)
    moments = [MOMENTS[index % len(MOMENTS)] for index in range(number)]
    draw.shuffle(moments)
    last = max(1, pace.batches - 1 - pace.batches // 8)  # later than that, a run may end before it is killed
    batches = [1 + int((index + draw.random()) / number * last) for index in range(number)]  # spread over the run
    # Rank 0 writes the checkpoints, and is the only rank during start-up.
    ranks_drawn = [0 if moment in (IN_SAVE, START) else draw.randrange(ranks) for moment in moments]
    fractions = [draw.random() for _ in moments]
    return [PlannedKill(*fields) for fields in zip(moments, batches, fractions, ranks_drawn, strict=True)]


class TrainingProcess:
    """A command that trains a run in a separate process, which is killed when this process exits.

    Its output is appended to `log`. After `patience` seconds without a new batch the run counts as hung.
    """

    def __init__(self, arguments: Sequence[str], run_dir: Path, log: Path, patience: float) -> None:
        self.run_dir = run_dir
        self.started = time.monotonic()
        self._patience = patience
        environment = environment_of_user() | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            PARENT: str(os.getpid()),
        }
        with log.open("a") as file:
            print(f"$ {shlex.join(['python', '-m', 'runner', *arguments])}", file=file, flush=True)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runner", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )

    def __enter__(self) -> TrainingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(0.0)
        self.process.wait()

    def progress(self, pause: float = POLL) -> Iterator[int]:
        """Yield the last batch with a digest, repeatedly until the process has ended.

        Raises:
            TimeoutError: the run has hung, with no new batch for `patience` seconds.
        """
        last = -1
        since = time.monotonic()
        while self.process.poll() is None:
            batch = last_batch(self.run_dir)
            if batch != last:
                last = batch
                since = time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise TimeoutError(f"no batch for {self._patience:g} s after batch {batch}: the run hangs")
            yield batch
            time.sleep(pause)

    def finish(self) -> RunPace:
        """Wait until the process exits on its own, and return the pace of the run.

        Raises:
            TimeoutError: the run has hung, with no new batch for `patience` seconds.
        """
        seen: list[tuple[int, float]] = []
        for batch in self.progress():
            if batch and (not seen or batch != seen[-1][0]):
                seen.append((batch, time.monotonic() - self.started))
        digests = read_digests(self.run_dir) if (self.run_dir / DIGESTS).exists() else []
        ends = [line["batch"] for line, after in itertools.pairwise(digests) if after["epoch"] > line["epoch"]]
        return RunPace(len(digests), ends, time.monotonic() - self.started, seen)

    def kill_at(self, kill: PlannedKill, pace: RunPace, resumed_from: int) -> CompletedKill | None:
        """Kill a process of the run at a planned moment; return the completed kill, or None if the run ended first.

        Raises:
            TimeoutError: the run has hung, or has not ended after one of its ranks was killed.
        """
        before = last_batch(self.run_dir)
        batch = max(kill.batch, before + 1)  # a batch that this session trains, not the one before
        moment = kill.moment if batch < pace.batches else START
        if moment == START:
            due = self.started + kill.fraction * pace.startup
            # At the first batch at the latest: this session may start faster than the first one did.
            has_come = any(now != before or time.monotonic() > due for now in self.progress())
        elif moment == IN_SAVE:
            has_come = any(now >= batch for now in self.progress()) and self._stop_in_save(int(kill.fraction * FILES))
        else:
            if moment == EPOCH_END:
                batch = next((end for end in pace.epoch_ends if end >= batch), batch)
            has_come = any(now >= batch for now in self.progress())
            time.sleep(kill.fraction * pace.pause_after(batch))
        if not has_come or self.process.poll() is not None:
            return None
        rank = self._kill(kill.rank)
        last = last_batch(self.run_dir)
        if next(self._find_partial(), None) is not None:
            moment = IN_SAVE
        elif last in (before, resumed_from):
            moment = START
        else:
            moment = EPOCH_END if last in pace.epoch_ends else TRAINING
        return CompletedKill(moment, last, rank)

    def _stop_in_save(self, files: int) -> bool:
        """Stop rank 0 with SIGSTOP once a checkpoint has `files` files; return False if it no longer writes any."""
        for _ in self.progress(pause=0.0):
            for partial in self._find_partial():
                with suppress(FileNotFoundError):
                    if len(os.listdir(partial)) < files:
                        continue
                    self.process.send_signal(signal.SIGSTOP)
                    time.sleep(POLL)  # time for it to stop
                    if partial.exists():
                        return True
                self.process.send_signal(signal.SIGCONT)  # the save just ended: try the start of the next one
                files = 0
        return False

    def _find_partial(self) -> Iterator[Path]:
        """Yield the hidden folder that rank 0 writes a checkpoint to, or wrote to when it was killed."""
        return self.run_dir.glob(f"*/.*.partial-{self.process.pid}")

    def _kill(self, rank: int) -> int:
        """Kill a rank, or rank 0 if that rank has not started; wait until all have ended, and return the number.

        Raises:
            TimeoutError: the run has not ended `GRACE` seconds after the kill.
        """
        import psutil

        processes: dict[int, Any] = {0: self.process}
        with suppress(psutil.Error):  # a process may end meanwhile
            for child in psutil.Process(self.process.pid).children():
                if child.cmdline()[-2:] == ["-m", "runner"]:
                    processes[int(child.environ()["RANK"])] = child
        rank = rank if rank in processes else 0
        processes[rank].kill()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run has not ended {GRACE:g} s after its rank {rank} was killed") from None
        self._end(LINGER)
        return rank

    def _end(self, seconds: float) -> None:
        """Kill every process of this session that has not exited after some seconds."""
        deadline = time.monotonic() + seconds
        while (members := self._members()) and time.monotonic() < deadline + GRACE:
            for pid in members if time.monotonic() >= deadline else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()  # so that it does not remain a zombie
            time.sleep(POLL)

    def _members(self) -> list[int]:
        """Return the ids of this session's processes that still run."""
        import psutil

        pids = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    pids.append(process.pid)
        return pids


def last_batch(run_dir: Path) -> int:
    """Return the last batch with a digest in a run; 0 without digests."""
    try:
        with (run_dir / DIGESTS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return 0
    return int(json.loads(whole.rpartition(b"\n")[2])["batch"]) if whole else 0
