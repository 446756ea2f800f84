"""Endings without failure: a run stops between two batches, for example after a signal, and can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from runner.distributed.signals import OF_SCHEDULERS
from runner.failures.errors import Requeued, SessionOver

SESSION_OVER = 1000
"""Takes the place of a signal number when the time of a session is over; no signal has this number."""

_requeues = False


def ending(number: int) -> BaseException:
    """Return the exception that ends this process, given the number of a signal or `SESSION_OVER`.

    It is KeyboardInterrupt for SIGINT, and SystemExit with 128 plus the number for other signals.
    """
    if number == SESSION_OVER:
        return SessionOver(0)
    if _requeues and number in OF_SCHEDULERS:
        return Requeued(0)
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def requeued_by_signals(enabled: bool) -> Iterator[None]:
    """Within the context, let signals of schedulers end this process by `Requeued`, if enabled. All ranks."""
    global _requeues
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Submitit requeues a job at its own signal without waiting for a checkpoint.
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in OF_SCHEDULERS}
    _requeues = True
    try:
        yield
    finally:
        _requeues = False
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def end(number: int, frame: FrameType | None) -> None:
    """End the process after a signal, closing everything first; a repeated signal does not interrupt this."""
    if number != signal.SIGINT:
        signal.signal(number, _ignore_repeat)
    raise ending(number)


def _ignore_repeat(number: int, frame: FrameType | None) -> None:
    """Ignore a signal that this process already handles."""
