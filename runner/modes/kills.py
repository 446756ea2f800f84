"""SIGKILL at chosen moments of a run that trains in a process of its own.

What the run does is seen from outside, in its folder: a line of digests after every batch, and a hidden folder while a
checkpoint is being written.
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

from runner.checkpoints.digest import FILE, read_digests
from runner.distributed.environment import PARENT

IN_SAVE = "inside a save"
START = "start-up"
EPOCH_END = "end of an epoch"  # where evaluations are, by default
TRAINING = "training"
MOMENTS = (IN_SAVE, START, TRAINING, EPOCH_END)
FILES = 4  # that are written one after another into a checkpoint

POLL = 0.001  # seconds between two looks at a run
GRACE = 60.0  # seconds in which a run ends after one of its ranks was killed
LINGER = 5.0  # seconds in which what a killed run has started ends by itself
TAIL = 4096  # bytes at the end of the digests, in which there is a whole line


@dataclass(frozen=True)
class Kill:
    """A kill that is to come.

    Attributes:
        moment: of `MOMENTS`.
        batch: that must have been trained before it comes, except in start-up.
        fraction: of the moment's duration that passes before it comes, in [0, 1).
        rank: whose process is killed; rank 0 where there is no other.
    """

    moment: str
    batch: int
    fraction: float
    rank: int


@dataclass(frozen=True)
class Struck:
    """A kill that has come.

    Attributes:
        moment: when; it may have turned out to be another than was planned.
        batch: the last one trained before it.
        rank: whose process was killed.
        resumed_from: the batch after which the run goes on; 0: it begins again.
    """

    moment: str
    batch: int
    rank: int
    resumed_from: int = 0


@dataclass(frozen=True)
class Pace:
    """How a run came on that nobody killed.

    Attributes:
        batches: how many it trained.
        epoch_ends: the last batches of all epochs but the last.
        seconds: that its process took.
        seen: last batch and seconds since its process was started, for each time at which there was a new one.
    """

    batches: int
    epoch_ends: list[int]
    seconds: float
    seen: list[tuple[int, float]]

    @property
    def startup(self) -> float:
        """Seconds until its first batch."""
        return self.seen[0][1] if self.seen else self.seconds

    def pause_after(self, batch: int) -> float:
        """Return the seconds from a batch to the next one that was seen."""
        begins = [second for one, second in self.seen if one <= batch]
        ends = [second for one, second in self.seen if one > batch]
        return ends[0] - begins[-1] if begins and ends else 0.0


def plan_kills(number: int, seed: int, pace: Pace, ranks: int) -> list[Kill]:
    """Return kills at random moments over a run, of all kinds where there are four of them; one is inside a save."""
    draw = random.Random(seed)
    moments = [MOMENTS[index % len(MOMENTS)] for index in range(number)]
    draw.shuffle(moments)
    last = max(1, pace.batches - 1 - pace.batches // 8)  # later, a run may have ended before the kill comes
    places = [1 + int((index + draw.random()) / number * last) for index in range(number)]  # all over the run
    # Rank 0 writes the checkpoints, and is there from the start.
    ranks_drawn = [0 if moment in (IN_SAVE, START) else draw.randrange(ranks) for moment in moments]
    return [Kill(*one) for one in zip(moments, places, (draw.random() for _ in moments), ranks_drawn, strict=True)]


class Session:
    """A command of this project in a process of its own, which ends with this one, and the run that it trains.

    Args:
        arguments: of `python -m runner`.
        run_dir: of the run.
        log: file to which it is added what the command prints.
        patience: seconds without a new batch after which it counts as hung.
    """

    def __init__(self, arguments: Sequence[str], run_dir: Path, log: Path, patience: float) -> None:
        self.run_dir = run_dir
        self.started = time.monotonic()
        self._patience = patience
        hidden = ("HYDRA_FULL_ERROR",)  # set by this process for itself
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # it imports what this one does
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
                start_new_session=True,  # Ctrl-C reaches the one who proves alone
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._end(0.0)
        self.process.wait()

    def progress(self, pause: float = POLL) -> Iterator[int]:
        """Yield the last batch with a digest, again and again until the process has ended.

        Args:
            pause: seconds between two looks.

        Raises:
            TimeoutError: there is no new batch for too long.
        """
        last, since = -1, time.monotonic()
        while self.process.poll() is None:
            batch = last_batch(self.run_dir)
            if batch != last:
                last, since = batch, time.monotonic()
            elif time.monotonic() - since > self._patience:
                raise TimeoutError(f"no batch for {self._patience:g} s after batch {batch}: the run hangs")
            yield batch
            time.sleep(pause)

    def finish(self) -> Pace:
        """Return how the run came on, once its process has ended by itself.

        Raises:
            TimeoutError: there is no new batch for too long.
        """
        seen: list[tuple[int, float]] = []
        for batch in self.progress():
            if batch and (not seen or batch != seen[-1][0]):
                seen.append((batch, time.monotonic() - self.started))
        digests = read_digests(self.run_dir) if (self.run_dir / FILE).exists() else []
        ends = [one["batch"] for one, after in itertools.pairwise(digests) if after["epoch"] > one["epoch"]]
        return Pace(len(digests), ends, time.monotonic() - self.started, seen)

    def strike(self, kill: Kill, pace: Pace, resumed_from: int) -> Struck | None:
        """Kill a process of the run when the moment has come; return what came of it, None where it was too late.

        Args:
            kill: when and whom.
            pace: of the run that nobody killed.
            resumed_from: the batch after which this session begins.

        Raises:
            TimeoutError: the run hangs, or outlives one of its ranks.
        """
        before = last_batch(self.run_dir)
        batch = max(kill.batch, before + 1)  # which this session has trained, and not the one before
        moment = kill.moment if batch < pace.batches else START
        if moment == START:
            due = self.started + kill.fraction * pace.startup
            # At its end at the latest: this session may be faster than the first.
            has_come = any(now != before or time.monotonic() > due for now in self.progress())
        elif moment == IN_SAVE:
            has_come = any(now >= batch for now in self.progress()) and self._stop_in_save(int(kill.fraction * FILES))
        else:
            if moment == EPOCH_END:
                batch = next((one for one in pace.epoch_ends if one >= batch), batch)
            has_come = any(now >= batch for now in self.progress())
            time.sleep(kill.fraction * pace.pause_after(batch))
        if not has_come or self.process.poll() is not None:
            return None
        rank, last = self._kill(kill.rank), last_batch(self.run_dir)
        if next(self._partial(), None) is not None:
            moment = IN_SAVE
        elif last in (before, resumed_from):
            moment = START
        else:
            moment = EPOCH_END if last in pace.epoch_ends else TRAINING
        return Struck(moment, last, rank)

    def _stop_in_save(self, files: int) -> bool:
        """Stop rank 0 while it writes a checkpoint, after some of its files; return whether there was one to come."""
        for _ in self.progress(pause=0.0):
            for partial in self._partial():
                with suppress(FileNotFoundError):
                    if len(os.listdir(partial)) < files:
                        continue
                    self.process.send_signal(signal.SIGSTOP)
                    time.sleep(POLL)  # until it has stopped
                    if partial.exists():
                        return True
                self.process.send_signal(signal.SIGCONT)  # too late by a hair: in the next one, at its beginning
                files = 0
        return False

    def _partial(self) -> Iterator[Path]:
        """Yield the folder into which rank 0 writes a checkpoint now, or did when it was killed."""
        return self.run_dir.glob(f"*/.*.partial-{self.process.pid}")

    def _kill(self, rank: int) -> int:
        """Kill a rank, rank 0 where there is no such process yet, and see that all end; return which it was."""
        import psutil

        others: dict[int, Any] = {0: self.process}
        with suppress(psutil.Error):  # they come and go
            for child in psutil.Process(self.process.pid).children():
                if child.cmdline()[-2:] == ["-m", "runner"]:
                    others[int(child.environ()["RANK"])] = child
        rank = rank if rank in others else 0
        others[rank].kill()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run has not ended {GRACE:g} s after its rank {rank} was killed") from None
        self._end(LINGER)
        return rank

    def _end(self, seconds: float) -> None:
        """Kill what has not ended by itself within some seconds, of all that this session has started."""
        deadline = time.monotonic() + seconds
        while (members := self._members()) and time.monotonic() < deadline + GRACE:
            for one in members if time.monotonic() >= deadline else ():
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            self.process.poll()  # so that it is no zombie
            time.sleep(POLL)

    def _members(self) -> list[int]:
        """Return the processes of this session that run."""
        import psutil

        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getsid(one.pid) == self.process.pid and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
        return found


def last_batch(run_dir: Path) -> int:
    """Return the last batch of which a run has a digest, 0 without one."""
    try:
        with (run_dir / FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return 0
    return int(json.loads(whole.rpartition(b"\n")[2])["batch"]) if whole else 0
