"""Sessions of training that are forked from a process which has imported everything: one starts in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # tests and their sessions import from here


def enter(function: Callable[..., None], arguments: Mapping[str, Any], env: Mapping[str, str], log: Path) -> None:
    """What a forked process does: the function, with its output in a file and the exit codes of the command line."""
    import warnings

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ |= env
    warnings.simplefilter("error")
    try:
        function(**arguments)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


class Session(NamedTuple):
    """A process that trains."""

    process: Any
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, deadline: float) -> int:
        """Its exit code, negative for a signal; the test fails where it does not end before the deadline."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
            pytest.fail(f"not finished in time\n{self.log.read_text()}")
        return code


class Sessions:
    """Starts functions of `sessions.py` as processes, alone or as ranks.

    Args:
        context: of `multiprocessing`, that forks.
        folder: for what the processes print.
    """

    def __init__(self, context: Any, folder: Path) -> None:
        self.context = context
        self.folder = folder
        self.started: list[Session] = []

    def start(self, function: Callable[..., None], env: Mapping[str, str] = {}, **arguments: Any) -> Session:
        """A process that calls `function(**arguments)`."""
        log = self.folder / f"{len(self.started)}.log"
        process = self.context.Process(target=enter, args=(function, arguments, dict(env), log))
        process.start()
        session = Session(process, log)
        self.started.append(session)
        return session

    def start_ranks(self, size: int, function: Callable[..., None], **arguments: Any) -> list[Session]:
        """Processes with the environment that torchrun gives; one alone gets none."""
        if size == 1:
            return [self.start(function, **arguments)]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        ranks = ({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size))
        return [self.start(function, env, **arguments) for env in ranks]

    def wait(self, sessions: Sequence[Session], timeout: float = 60.0) -> list[int]:
        """The exit codes of processes, all of which end within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        return [session.wait(deadline) for session in sessions]

    def run(
        self, function: Callable[..., None], *, ends: int | Sequence[int] = 0, ranks: int = 1, **arguments: Any
    ) -> None:
        """Call `function(**arguments)` in a process, or on ranks; the test fails where one ends in another way.

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
            if session.process.is_alive():
                session.process.kill()
            session.process.join()


@pytest.fixture(scope="session")
def forking() -> Any:
    """The context of a process that waits to be forked, with `sessions.py` imported; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sessions"])
    with pytest.MonkeyPatch.context() as patch:
        path = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        forkserver.ensure_running()
    return context


@pytest.fixture
def sessions(forking: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    """Starts sessions of training, none of which outlives the test."""
    made = Sessions(forking, tmp_path_factory.mktemp("sessions"))
    try:
        yield made
    finally:
        made.close()
