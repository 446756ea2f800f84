"""Python processes for tests: forked from a process that has imported everything, or new interpreters."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

SERVER = Path(__file__).with_name("fork_server.py")
TEMPORARY = Path(tempfile.gettempdir())  # determined at import, because a test may change it before the server starts
CAN_FORK = sys.platform == "linux"
# Seconds to wait for anything: so long that it passes on the slowest machine, and only a hang reaches the limit.
PATIENCE = 600.0
GRACE = 30.0  # seconds that the remaining processes have to end after one of them has failed
PORTS = range(15_000, 32_000)  # below the ports of outgoing connections, which begin at 32768 on Linux

EXTRAS = "TESTS_EXTRAS"
"""Environment variable: if set, processes are forked from one that has imported transformers and its like too."""

Finished = subprocess.CompletedProcess[str]


class PythonProcess:
    """Like `subprocess.Popen([sys.executable, *arguments])`, but it starts in 0.1 s because its imports are done.

    For the same reason it cannot test imports: their effects, when they happen, or which package hides another. Start
    a new interpreter for that.

    Args:
        arguments: command-line arguments of Python.
        cwd: the working directory.
        env: the environment.
        stdin, stdout, stderr: a file, `subprocess.PIPE` (binary), `subprocess.DEVNULL`, or None to inherit ours.
        start_new_session: whether the process leads a new session.
        process_group: the process group that it joins; 0 makes it lead a new one, None keeps that of the server.
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
            for name, target in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                streams.append(self._open(name, target, streams, stack))
            socket.send_fds(_requests(EXTRAS in job["env"]), [b"fork"], [theirs.fileno(), *streams])
        self._channel.sendall(json.dumps(job).encode() + b"\n")
        self._received = b""
        self.pid = self._read_number(PATIENCE)

    def _open(self, name: str, target: Any, streams: Sequence[int], stack: contextlib.ExitStack) -> int:
        """Return the file descriptor to pass to the server for one of the standard streams."""
        if target is None:
            return ("stdin", "stdout", "stderr").index(name)
        if target == subprocess.STDOUT:
            return streams[1]
        if target == subprocess.DEVNULL:
            return stack.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
        if target != subprocess.PIPE:
            return target if isinstance(target, int) else target.fileno()
        reader, writer = os.pipe()
        ours, theirs = (writer, reader) if name == "stdin" else (reader, writer)
        stack.callback(os.close, theirs)
        setattr(self, name, os.fdopen(ours, "wb" if name == "stdin" else "rb", buffering=0 if name == "stdin" else -1))
        return theirs

    def _read_number(self, timeout: float) -> int:
        """Return the next number that the server sends.

        Raises:
            subprocess.TimeoutExpired: no number has arrived after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout)
            chunk = b""
            with contextlib.suppress(ConnectionResetError):
                chunk = self._channel.recv(64)
            if not chunk:
                raise RuntimeError("the fork server of the tests has ended; its error message is on stderr")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return int(line)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._read_number(1e9 if timeout is None else timeout)
            self._channel.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
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
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.02)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the running processes whose working directory is `folder`, including orphans."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                running.append(process)
    return running


class _Server:
    """A connection to a fork server, which all pytest processes of a test run share, and the first one starts.

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
            except OSError:  # there is no server yet, or it has ended
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
        """Disconnect, and wait for the server to exit if this process started it; it exits after its last client."""
        self.requests.close()
        if self._process is not None:
            self._process.wait()
            for file in self._files:
                file.unlink(missing_ok=True)


_servers: dict[bool, _Server] = {}
_starting = threading.Lock()  # otherwise two threads could each start a server


def _requests(extras: bool) -> socket.socket:
    """Return the socket for requests to a fork server, and start the server if it is not running."""
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
    arguments: Sequence[str], *, real: bool = False, **options: Any
) -> PythonProcess | subprocess.Popen[bytes]:
    """Start a Python process: forked on Linux, a new interpreter on other systems.

    Args:
        arguments: command-line arguments of Python.
        real: start a new interpreter on Linux too.
        **options: further arguments of `PythonProcess`.
    """
    if CAN_FORK and not real:
        return PythonProcess(arguments, **options)
    options.pop("forks", None)
    process: Any = subprocess.Popen([sys.executable, *map(str, arguments)], **{"stdin": subprocess.DEVNULL, **options})
    return process


def run_python(arguments: Sequence[str], *, timeout: float = PATIENCE, check: bool = False, **options: Any) -> Finished:
    """Run a Python process until it ends, and return its exit code and output.

    Args:
        arguments: command-line arguments of Python.
        timeout: seconds after which it is killed, with all processes of its session.
        check: fail the test unless it exits with 0.
        **options: further arguments of `start_python`.

    Raises:
        subprocess.TimeoutExpired: the process did not end in time.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start_python(arguments, stdout=out, stderr=err, start_new_session=True, **options)
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
    """Run `python ARGUMENTS` once in each environment, all at the same time, and return their exit codes and outputs.

    A process that fails has the others killed, with their sessions, `GRACE` seconds later.

    Args:
        arguments: command-line arguments of Python.
        environments: changes to the environment, for each process; None removes a variable.
        folder: the working directory of the processes.
        logs: a folder for their output.
        timeout: seconds after which all processes are killed, and the test fails.
        forks: whether the Python processes that they start are forked too.
        real: start new interpreters on Linux too.
    """
    with contextlib.ExitStack() as stack:
        processes: list[PythonProcess | subprocess.Popen[bytes]] = []
        for index, changes in enumerate(environments):
            # Files, not pipes: reading a pipe ends only after the last grandchild that has it open has ended.
            out, err = (stack.enter_context((logs / f"{index}.{kind}").open("wb")) for kind in ("out", "err"))
            env = {name: value for name, value in (os.environ | changes).items() if value is not None}
            process = start_python(
                arguments,
                real=real,
                cwd=folder,
                env=env,
                stdout=out,
                stderr=err,
                start_new_session=True,
                forks=forks,
            )
            processes.append(stack.enter_context(process))
        start_time = time.monotonic()
        deadline = start_time + timeout
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
    if time.monotonic() - start_time >= timeout:
        pytest.fail(f"not finished after {timeout} s\n{describe(finished)}")
    return finished


def describe(finished: Sequence[Finished]) -> str:
    """Return the exit codes and outputs of processes as text for a failure message."""
    return "\n".join(
        f"--- process {index}: exit code {process.returncode}\n{process.stdout}\n--- its stderr\n{process.stderr}"
        for index, process in enumerate(finished)
    )


def find_free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago.

    A port chosen by the operating system would be one of those for outgoing connections, so another process might get
    it before the test uses it.
    """
    with socket.socket() as listener:
        for port in secrets.SystemRandom().sample(PORTS, 50):
            with contextlib.suppress(OSError):  # in use
                listener.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("none of 50 ports of 127.0.0.1 can be used")
