"""Sessions of training for the tests of promises: each is a forked process, which starts in 0.1 s."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from python_process import PATIENCE, find_free_port, start_python

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
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
"""A program that calls a pickled function, and exits with the exit codes of the command line."""


class Session(NamedTuple):
    """A process that trains, and the file with its output."""

    process: Any
    log: Path

    def wait(self, deadline: float) -> int:
        """Return the exit code, negative for a signal; fail the test if the process still runs at the deadline."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the session did not end in time\n{self.log.read_text()}")


class Sessions:
    """Starts functions of `sessions.py` as processes, alone or as ranks.

    Args:
        folder: a folder for the output of the processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Session] = []

    def start(self, function: Callable[..., None], env: Mapping[str, str] = {}, **arguments: Any) -> Session:
        """Start a process that calls `function(**arguments)`."""
        log, job = (self.folder / f"{len(self.started)}.{kind}" for kind in ("log", "job"))
        job.write_bytes(pickle.dumps((function, arguments)))
        path = os.pathsep.join([str(SUPPORT), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        shared = {**os.environ, "PYTHONPATH": path}
        with log.open("ab") as file:
            process = start_python(
                ["-c", ENTER, str(job)], env={**shared, **env}, stdout=file, stderr=file, forks=False
            )
        session = Session(process, log)
        self.started.append(session)
        return session

    def start_ranks(self, size: int, function: Callable[..., None], **arguments: Any) -> list[Session]:
        """Start ranks with the environment variables of torchrun; a single rank gets none of them."""
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
        """Return the exit codes of sessions; fail the test if one does not end within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        return [session.wait(deadline) for session in sessions]

    def run(
        self, function: Callable[..., None], *, ends: int | Sequence[int] = 0, ranks: int = 1, **arguments: Any
    ) -> None:
        """Call `function(**arguments)` in a process or on several ranks, and check their exit codes.

        Args:
            function: a function of `sessions.py`.
            ends: the expected exit code, for all ranks or for each.
            ranks: number of ranks.
            **arguments: arguments of the function.
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
        """Call a function as in `run` for each mapping of arguments, a few at the same time."""
        expected = [ends] * ranks if isinstance(ends, int) else list(ends)
        for first in range(0, len(calls), at_once):
            groups = [self.start_ranks(ranks, function, **arguments) for arguments in calls[first : first + at_once]]
            sessions = [session for group in groups for session in group]
            codes = self.wait(sessions)
            if codes != expected * len(groups):
                logs = "\n".join(f"--- {number}\n{session.log.read_text()}" for number, session in enumerate(sessions))
                pytest.fail(f"exit codes {codes}, expected {expected} for each call\n{logs}")

    def close(self) -> None:
        """Kill the sessions that are still running."""
        for session in self.started:
            session.process.kill()
            session.process.wait()


@pytest.fixture
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    """Starts sessions of training, and kills those that are still running at the end of the test."""
    started = Sessions(tmp_path_factory.mktemp("sessions"))
    try:
        yield started
    finally:
        started.close()
