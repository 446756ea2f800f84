"""Ranks from inside: this process is rank 0 and the job, plain child processes are the others."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

from runner.distributed.environment import PARENT, environment
from runner.distributed.job import Job
from runner.distributed.launch import Ranks
from runner.distributed.launch_secret import VARIABLE, use_secret
from runner.distributed.signals import HANDLED
from runner.distributed.threads import VARIABLES

if TYPE_CHECKING:
    from runner.failures import RankFailed

STOPPED = {128 + number: signal.Signals(number).name for number in HANDLED}
"""Exit codes of a child that a signal has stopped, as a rule because all ranks agreed to, and the signal's name."""

PR_SET_PDEATHSIG = 1
GRACE = 4.0  # seconds in which ranks leave a failed job, or end, by themselves
CLOSING = 60.0  # seconds in which rank 0, once it knows of the failure, closes what the job has open
AGREED = 0.5  # seconds after which this process, too, knows that the ranks have agreed to end
POLL = 0.25  # seconds between two looks at the others


class LocalRanks(Ranks):
    """Child processes that are ranks 1 and up while this process is rank 0. They are kept from one job to the next.

    They are started anew where another number is wanted, one of them has died, or the job before has failed. In a
    process that stays alone everything here does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._children: list[subprocess.Popen[bytes]] = []
        self._listener: socket.socket | None = None
        atexit.register(self.end)

    def start(self, processes: int, threads: int | None) -> None:
        if processes == self.size and all(child.poll() is None for child in self._children):
            return
        self.end()
        self.size = processes
        if processes == 1:
            return
        # They call at a socket that listens already, so no other process can take the port before rank 0 answers.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=processes)
        secret = secrets.token_hex()  # any process of this machine can call there
        use_secret(secret)
        shared = {
            **os.environ,
            **self._environment(0),
            **({} if threads is None else dict.fromkeys(VARIABLES, str(threads))),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._listener.getsockname()[1]),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # they import what this one does
            PARENT: str(os.getpid()),
            VARIABLE: secret,
        }
        self._children = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "runner"],
                env=shared | self._environment(rank),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches rank 0 alone, which agrees with the others on what to do
            )
            for rank in range(1, processes)
        ]

    @contextmanager
    def sharing(self, job: Job) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        with environment(self._environment(0)):
            try:
                self._send({"job": asdict(job)})
                with _Watch(self._children):
                    yield
            except BaseException:
                self.end()
                raise

    def dismiss(self, exit_code: int) -> None:
        self.end()

    def end(self) -> None:
        """Let the children leave, if they do so within a moment, and end the others."""
        if self._store is not None:
            self._send({"exit": 0})
        deadline = time.monotonic() + (0.0 if self._store is None else GRACE)
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.kill()
            child.wait()
        if self._listener is not None:
            self._listener.close()
        if self._store is not None:
            from runner.distributed.store import leave

            leave()
        self._children, self._listener, self._store = [], None, None
        self.size, self._messages = 1, 0

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
        }

    def _connect(self) -> Any:
        if self._listener is not None:
            from runner.distributed.store import host

            host(self._listener.detach())
            self._listener = None
        return super()._connect()


_ranks: Ranks | None = None


def ranks() -> Ranks:
    """Return the ranks of this process; the same object at every call."""
    global _ranks
    if _ranks is None:
        _ranks = Ranks() if "RANK" in os.environ else LocalRanks()
    return _ranks


class _Watch:
    """Looks after the children while this process works on a job with them.

    When one fails, this process most often sees it by itself, in what it waits for. Where it does not, a signal
    interrupts what it does, and where that does not help either the process ends.

    Args:
        children: ranks 1 and up.
    """

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        from runner.distributed import store as meeting

        self._children = children
        self._meeting = meeting
        self._store = meeting.connect()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._failure: RankFailed | None = None
        self._handler_before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # nowhere else can a signal's handler be set
            self._handler_before = signal.signal(signal.SIGURG, self._interrupt)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._handler_before is not None:
            signal.signal(signal.SIGURG, self._handler_before)

    def _run(self) -> None:
        while not self._over.wait(POLL):
            self._failure = self._look()
            if self._failure is not None:
                break
        if self._over.wait(GRACE):
            return
        for child in self._children:
            child.kill()  # what waits for them in this process fails now
        stopping = self._meeting.stopping
        if not stopping.wait(1.0) and self._handler_before is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        # What is read back from a GPU may wait for an all-reduce, and that for the failed rank.
        if not self._over.wait(CLOSING if stopping.wait(2.0) else 0.0):
            print(self._failure, file=sys.stderr, flush=True)
            os._exit(1)

    def _look(self) -> RankFailed | None:
        """Return what failed first, None while nothing did."""
        for rank, child in enumerate(self._children, 1):
            code = child.poll()
            if code is not None and not (code in STOPPED and self._meeting.agreed_to_end.wait(AGREED)):
                return self._meeting.report_failure(self._store, rank, _describe_end(code))
        return self._meeting.find_failure(self._store)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._failure is not None:
            raise self._failure


def _describe_end(code: int) -> str:
    if code in STOPPED:
        return f"it was ended by {STOPPED[code]} before the ranks could agree to end"
    if code >= 0:
        return f"it ended with exit code {code}; what it had to say is above"
    reason = ", as the system does where memory is short" if code == -signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{reason}"


def end_with_parent() -> None:
    """Have this process killed when the one ends that started it from inside, however that comes about."""
    if PARENT not in os.environ:
        return  # torchrun looks after its workers
    parent = int(os.environ[PARENT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_when_orphaned, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it has ended before that was arranged
        os._exit(1)


def _end_when_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@functools.cache
def end_with(process: int) -> None:
    """Have this process, which a launcher started for a sweep, end soon after another: as on SIGTERM, if it can.

    Args:
        process: the sweep's process id, on this machine.
    """
    threading.Thread(target=_end_after, args=(process,), name="sweep", daemon=True).start()


def _end_after(process: int) -> None:
    while is_alive(process):
        time.sleep(1.0)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # as between two jobs
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs."""
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
