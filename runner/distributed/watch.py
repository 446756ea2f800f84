"""Watches the child processes that are the other ranks of a job."""

from __future__ import annotations

import signal
import subprocess
import threading
from types import FrameType
from typing import Any

from runner.distributed.endings import end_abruptly
from runner.distributed.signals import HANDLED
from runner.distributed.store import agreed_to_end, connect, find_failure, report_failure, stopping
from runner.failures.errors import RankFailed
from runner.failures.exit_codes import FAILED, code_of_failure
from runner.failures.facts import Facts

STOPPED = {128 + number: signal.Signals(number).name for number in HANDLED}
"""Names of signals, by the exit code of a child that the signal stopped, usually by agreement of all ranks."""

CLOSING = 60.0  # seconds that rank 0 has to close what the job opened, once it knows of a failure
AGREED = 0.5  # seconds to wait for this process to learn that the ranks agreed to end
POLL = 0.25  # seconds between checks of the children


class Watch:
    """Watches the child processes while this process works on a job with them.

    When a child fails, this process usually notices, because its own collective operation fails. If it does not leave
    the job within `grace` seconds, the other children are killed, then a signal interrupts its work, and finally this
    process is ended.
    """

    def __init__(self, children: list[subprocess.Popen[bytes]], grace: float) -> None:
        self._children = children
        self._grace = grace
        self._store = connect()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._failure: RankFailed | None = None
        self._handler_before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # only it can set signal handlers
            self._handler_before = signal.signal(signal.SIGURG, self._interrupt)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        if self._handler_before is not None:
            signal.signal(signal.SIGURG, self._handler_before)

    def _run(self) -> None:
        while not self._over.wait(POLL):
            self._failure = self._find_failure()
            if self._failure is not None:
                break
        if self._over.wait(self._grace):
            return
        for child in self._children:
            child.kill()  # operations that wait for them now fail
        if not stopping.wait(1.0) and self._handler_before is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        # Reading from a GPU may wait for an all-reduce, which waits for the failed rank.
        if not self._over.wait(CLOSING if stopping.wait(2.0) else 0.0):
            end_abruptly(FAILED if self._failure is None else code_of_failure(self._failure), str(self._failure))

    def _find_failure(self) -> RankFailed | None:
        """Return the first failure, or None."""
        for rank, child in enumerate(self._children, 1):
            code = child.poll()
            if code is not None and not (code in STOPPED and agreed_to_end.wait(AGREED)):
                return report_failure(self._store, rank, _describe_end(code), Facts(of_environment=code < 0))
        return find_failure(self._store)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._failure is not None:
            raise self._failure


def _describe_end(code: int) -> str:
    if code in STOPPED:
        return f"it was ended by {STOPPED[code]} before the ranks could agree to end"
    if code >= 0:
        return f"it ended with exit code {code}; its messages are above"
    reason = ", which the system does when memory is short" if code == -signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{reason}"
