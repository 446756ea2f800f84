"""Ranks without torchrun: this process is rank 0, and child processes are the others."""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from runner.distributed.environment import PARENT, environment
from runner.distributed.launch import Ranks
from runner.distributed.launch_secret import VARIABLE, use_secret
from runner.distributed.threads import VARIABLES
from runner.failures.tracebacks import environment_of_user

PR_SET_PDEATHSIG = 1
GRACE = 4.0  # seconds that ranks have to leave a failed job or to exit before they are killed


class LocalRanks(Ranks):
    """Child processes that serve as ranks 1 and up while this process is rank 0. Later jobs reuse them.

    New children are started if the number of ranks changes, a child has died, or the previous job failed. With a single
    process, these methods do nothing.
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
        # The socket listens before the children connect, so no other process can take its port.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=processes)
        secret = secrets.token_hex()  # because any process on this machine can connect to that socket
        use_secret(secret)
        shared = {
            **environment_of_user(),
            **self._environment(0),
            **({} if threads is None else dict.fromkeys(VARIABLES, str(threads))),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._listener.getsockname()[1]),
            # The children import the same modules as this process.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            PARENT: str(os.getpid()),
            VARIABLE: secret,
        }
        self._children = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "runner"],
                env=shared | self._environment(rank),
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches rank 0 alone, and the ranks agree on what to do
            )
            for rank in range(1, processes)
        ]

    @contextmanager
    def sharing(self, job: Mapping[str, Any]) -> Iterator[None]:
        if self.size == 1:
            yield
            return
        with environment(self._environment(0)):
            try:
                self._send({"job": job})
                from runner.distributed.watch import Watch  # imports torch

                with Watch(self._children, GRACE):
                    yield
            except BaseException:
                self.end()
                raise

    def dismiss(self, exit_code: int) -> None:
        self.end()

    def end(self) -> None:
        """Wait for the children to exit, and kill those that take longer than `GRACE`."""
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
            from runner.distributed.store import disconnect

            disconnect()
        self._children = []
        self._listener = None
        self._store = None
        self.size = 1
        self._messages = 0

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
    """Return the ranks of this process; every call returns the same object."""
    global _ranks
    if _ranks is None:
        _ranks = Ranks() if "RANK" in os.environ else LocalRanks()
    return _ranks


def end_with_parent() -> None:
    """Have this process killed when its parent, rank 0, ends for any reason."""
    if PARENT not in os.environ:
        return  # torchrun looks after its workers
    parent = int(os.environ[PARENT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_when_orphaned, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before that took effect
        os._exit(1)


def _end_when_orphaned(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@functools.cache
def end_with(process: int) -> None:
    """End this process, which a launcher started for a sweep, soon after the sweep ends: by SIGTERM if possible."""
    threading.Thread(target=_end_after, args=(process,), name="sweep", daemon=True).start()


def _end_after(process: int) -> None:
    while is_alive(process):
        time.sleep(1.0)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # ignored between two jobs
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)


def is_alive(process: int) -> bool:
    """Return whether a process on this machine is running."""
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
