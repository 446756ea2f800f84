"""Sessions of training that are forked from a process which has imported everything: one starts in milliseconds."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from python_process import PATIENCE, find_free_port, start_python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENTER = """
import pickle, signal, sys, warnings
with open(sys.argv[1], "rb") as file:
    function, arguments = pickle.load(file)
warnings.simplefilter("error")  # here, not in the processes that it starts
try:
    function(**arguments)
except KeyboardInterrupt:
    raise SystemExit(128 + signal.SIGINT) from None
"""
"""Calls a pickled function, and exits with the codes of the command line."""


class Session(NamedTuple):
    """A process that trains."""

    process: Any
    log: Path

    def wait(self, deadline: float) -> int:
        """Its exit code, negative for a signal; the test fails if it does not end before the deadline."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"not finished in time\n{self.log.read_text()}")


class Sessions:
    """Starts functions of `sessions.py` as processes, alone or as ranks.

    Args:
        folder: for what the processes print.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Session] = []

    def start(self, function: Callable[..., None], env: Mapping[str, str] = {}, **arguments: Any) -> Session:
        """A process that calls `function(**arguments)`."""
        log, job = (self.folder / f"{len(self.started)}.{kind}" for kind in ("log", "job"))
        job.write_bytes(pickle.dumps((function, arguments)))
        path = os.pathsep.join([str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        shared = {**os.environ, "PYTHONPATH": path}
        with log.open("ab") as file:
            process = start_python(
                ["-c", ENTER, str(job)], env={**shared, **env}, stdout=file, stderr=file, forks=False
            )
        session = Session(process, log)
        self.started.append(session)
        return session

    def start_ranks(self, size: int, function: Callable[..., None], **arguments: Any) -> list[Session]:
        """Processes with the environment that torchrun gives; one alone gets none."""
        if size == 1:
            return [self.start(function, **arguments)]
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        ranks = ({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size))
        return [self.start(function, env, **arguments) for env in ranks]

    def wait(self, sessions: Sequence[Session], timeout: float = PATIENCE) -> list[int]:
        """The exit codes of processes, all of which end within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        return [session.wait(deadline) for session in sessions]

    def run(
        self, function: Callable[..., None], *, ends: int | Sequence[int] = 0, ranks: int = 1, **arguments: Any
    ) -> None:
        """Call `function(**arguments)` in a process, or on ranks; the test fails if one ends in another way.

        `ends` is the exit code of all, or of each rank.
        """
        self.run_each(function, [arguments], ends=ends, ranks=ranks)

    def run_each(
        self,
        function: Callable[..., None],
        calls: Sequence[Mapping[str, Any]],
        *,
        ends: int | Sequence[int] = 0,
        ranks: int = 1,
        at_once: int = 2,
    ) -> None:
        """Call a function as in `run` with each of several arguments, some at once."""
        expected = [ends] * ranks if isinstance(ends, int) else list(ends)
        for first in range(0, len(calls), at_once):
            started = [self.start_ranks(ranks, function, **one) for one in calls[first : first + at_once]]
            together = [session for one in started for session in one]
            codes = self.wait(together)
            if codes != expected * len(started):
                logs = "\n".join(f"--- {number}\n{one.log.read_text()}" for number, one in enumerate(together))
                pytest.fail(f"exit codes {codes}, not {expected} each\n{logs}")

    def close(self) -> None:
        """End what still runs."""
        for session in self.started:
            session.process.kill()
            session.process.wait()
