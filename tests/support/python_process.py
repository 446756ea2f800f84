"""Python processes for tests: forked from one that has imported everything, or started for real."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

SERVER = Path(__file__).with_name("fork_server.py")
TEMPORARY = Path(tempfile.gettempdir())  # now: a test may set another one, and ask for the first process
CAN_FORK = sys.platform == "linux"
# Seconds to wait for anything. No machine is so slow that it takes longer, so that only a hang reaches this.
PATIENCE = 600.0
GRACE = 30.0  # seconds that processes have to notice that another has failed
PORTS = range(15_000, 32_000)  # below the ports of outgoing connections, which begin at 32768 on Linux

EXTRAS = "TESTS_EXTRAS"
"""Environment variable: if set, processes are forked from one that has imported transformers and its like too."""

Finished = subprocess.CompletedProcess[str]


class PythonProcess:
    """Like `subprocess.Popen([sys.executable, *arguments])`, but it starts in 0.1 s because its imports are done.

    For the same reason it says nothing about imports: what they do, when they happen, and which package hides another.
    Start a real interpreter to test those.

    Args:
        arguments: as Python takes them.
        cwd: the working directory.
        env: the environment.
        stdin, stdout, stderr: a file, `subprocess.PIPE` (binary), `subprocess.DEVNULL`, or None for ours.
        start_new_session: whether it leads a session.
        process_group: the group of processes that it joins; 0: it leads one; None: that of the server.
        forks: whether the Python processes that it starts are forked too.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        process_group: int | None = None,
        forks: bool = True,
    ) -> None:
        self.args = [sys.executable, *map(str, arguments)]
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = None, None, None
        job = {
            "arguments": self.args[1:],
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "session": start_new_session,
            "group": process_group,
            "forks": forks,
        }
        self._channel, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            streams = []
            for name, given in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                streams.append(self._open(name, given, streams, stack))
            socket.send_fds(_requests(EXTRAS in job["env"]), [b"fork"], [theirs.fileno(), *streams])
        self._channel.sendall(json.dumps(job).encode() + b"\n")
        self._heard = b""
        self.pid = self._hear(PATIENCE)

    def _open(self, name: str, given: Any, streams: Sequence[int], stack: contextlib.ExitStack) -> int:
        """Return the file descriptor to hand over as one of the standard streams."""
        if given is None:
            return ("stdin", "stdout", "stderr").index(name)
        if given == subprocess.STDOUT:
            return streams[1]
        if given == subprocess.DEVNULL:
            return stack.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
        if given != subprocess.PIPE:
            return given if isinstance(given, int) else given.fileno()
        reader, writer = os.pipe()
        ours, theirs = (writer, reader) if name == "stdin" else (reader, writer)
        stack.callback(os.close, theirs)
        setattr(self, name, os.fdopen(ours, "wb" if name == "stdin" else "rb", buffering=0 if name == "stdin" else -1))
        return theirs

    def _hear(self, timeout: float) -> int:
        """Return the next number that the server sends.

        Raises:
            subprocess.TimeoutExpired: it says nothing for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                received = self._channel.recv(64)
            if not received:
                raise RuntimeError("the process that forks those of the tests has ended: what it said is on stderr")
            self._heard += received
        line, _, self._heard = self._heard.partition(b"\n")
        return int(line)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._hear(1e9 if timeout is None else timeout)
            self._channel.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it is known to have ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> PythonProcess:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds; the test fails if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Living processes whose working directory is `folder`, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
    return found


class _Server:
    """A connection to a fork server. All pytest processes of a run share it; the first to ask starts it.

    Args:
        extras: whether it has imported optional libraries too, which takes a process four seconds.
    """

    def __init__(self, extras: bool) -> None:
        self._options = ["--extras"] if extras else []
        self._process: subprocess.Popen[bytes] | None = None
        self._files: list[Path] = []
        self.requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        address = str(TEMPORARY / "".join(["tests-", run, *self._options]))
        with FileLock(f"{address}.lock"):
            try:
                self.requests.connect(address)
            except OSError:  # it does not exist, or has ended
                Path(address).unlink(missing_ok=True)
                self._start(address)
                self.requests.connect(address)

    def _start(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-P", SERVER, str(listener.fileno()), *self._options],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        self._files = [Path(address), Path(f"{address}.lock")]

    def end(self) -> None:
        """Disconnect. The server exits after its last client; the process that started it waits for that."""
        self.requests.close()
        if self._process is not None:
            self._process.wait()
            for file in self._files:
                file.unlink(missing_ok=True)


_servers: dict[bool, _Server] = {}
_starting = threading.Lock()  # a second server of a kind would end with the processes that it has forked


def _requests(extras: bool) -> socket.socket:
    """Return the socket that takes requests, after starting the server if need be."""
    with _starting:
        if extras not in _servers:
            _servers[extras] = _Server(extras)
    return _servers[extras].requests


@atexit.register
def end_servers() -> None:
    """Disconnect from the fork servers, which kill the processes that they forked for this one."""
    while _servers:
        _servers.popitem()[1].end()


def start_python(
    arguments: Sequence[str], *, real: bool = False, **given: Any
) -> PythonProcess | subprocess.Popen[bytes]:
    """Start a Python process: forked on Linux, in an interpreter of its own elsewhere.

    Args:
        arguments: as Python takes them.
        real: start a new interpreter on Linux too.
        **given: as `PythonProcess` takes it.
    """
    if CAN_FORK and not real:
        return PythonProcess(arguments, **given)
    given.pop("forks", None)
    process: Any = subprocess.Popen([sys.executable, *map(str, arguments)], **{"stdin": subprocess.DEVNULL, **given})
    return process


def run_python(arguments: Sequence[str], *, timeout: float = PATIENCE, check: bool = False, **given: Any) -> Finished:
    """Run a Python process to its end and return its exit code and output.

    Args:
        arguments: as Python takes them.
        timeout: seconds until it is killed, with all processes of its session.
        check: fail the test unless it exits with 0.
        **given: as `start_python` takes it.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_python(arguments, stdout=out, stderr=err, start_new_session=True, **given)
        with process:
            try:
                process.wait(timeout)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    finished = Finished(process.args, process.wait(), *texts)
    if check and finished.returncode:
        pytest.fail(describe([finished]))
    return finished


def run_commands(commands: Iterable[Sequence[str]], folder: Path) -> None:
    """Run `python -m runner ARGUMENTS` for each list of arguments, in one process, so that imports happen once.

    The test fails unless all of them end with 0.
    """
    program = f"""
import sys
from runner.__main__ import main

for arguments in {[[*map(str, command)] for command in commands]!r}:
    sys.argv = ["runner", *arguments]
    if code := main():
        sys.exit(code)
"""
    run_python(["-c", program], cwd=folder, check=True)


def run_processes(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str | None]],
    *,
    folder: Path,
    logs: Path,
    timeout: float,
    forks: bool = True,
    real: bool = False,
) -> list[Finished]:
    """What `python ARGUMENTS` gave, once in each environment, all at the same time.

    Each process leads a group of its own, which is killed after `timeout` seconds (the test fails then), or `GRACE`
    seconds after another of them failed. An environment's None removes a variable; `real` and `forks` are as in
    `start_python`.
    """
    with contextlib.ExitStack() as stack:
        processes: list[PythonProcess | subprocess.Popen[bytes]] = []
        for index, changes in enumerate(environments):
            # Files, not pipes: a pipe ends only when the last grandchild that holds it has ended.
            out, err = (stack.enter_context((logs / f"{index}.{kind}").open("wb")) for kind in ("out", "err"))
            env = {name: value for name, value in (os.environ | changes).items() if value is not None}
            started = start_python(
                arguments,
                real=real,
                cwd=folder,
                env=env,
                stdout=out,
                stderr=err,
                start_new_session=True,
                forks=forks,
            )
            processes.append(stack.enter_context(started))
        began = time.monotonic()
        deadline = began + timeout
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.returncode for process in processes):
                    deadline = min(deadline, time.monotonic() + GRACE)
                time.sleep(0.01)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    finished = [
        Finished(process.args, process.wait(), (logs / f"{i}.out").read_text(), (logs / f"{i}.err").read_text())
        for i, process in enumerate(processes)
    ]
    if time.monotonic() - began >= timeout:
        pytest.fail(f"not finished after {timeout} s\n{describe(finished)}")
    return finished


def describe(finished: Sequence[Finished]) -> str:
    """The exit status and output of processes, to read."""
    return "\n".join(
        f"--- process {index}: exit {one.returncode}\n{one.stdout}\n--- its stderr\n{one.stderr}"
        for index, one in enumerate(finished)
    )


def find_free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody used a moment ago.

    The system would choose one from which it also serves outgoing connections, so that any process might take it before
    the test does.
    """
    with socket.socket() as listener:
        for port in secrets.SystemRandom().sample(PORTS, 50):
            with contextlib.suppress(OSError):  # in use
                listener.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("none of 50 ports of 127.0.0.1 can be used")
