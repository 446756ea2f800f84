"""Signals, which end training from outside.

After a signal, the current batch is finished and a checkpoint is written before the process ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ALWAYS = (signal.SIGTERM, signal.SIGINT)
OF_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED = (*ALWAYS, signal.SIGHUP, *OF_SCHEDULERS)
"""Signals that ask a run to end. Users and schedulers send them; SIGHUP arrives when a terminal is closed."""

SESSION_OVER = 1000
"""Stands where the number of a signal would, when the time of a session is over; no signal has this number."""

_requeues = False


class SessionOver(SystemExit):
    """The time of this session is over: training has stopped between two batches, and can be resumed. Exit code 0."""


class Requeued(SessionOver):
    """A scheduler wants the machine back: its job is to go back into the queue, and be resumed when it runs again."""


def ending(number: int) -> BaseException:
    """Return the exception to end this process with, for the number of a signal or `SESSION_OVER`.

    That is KeyboardInterrupt for SIGINT, and SystemExit with 128 plus the number for other signals.
    """
    if number == SESSION_OVER:
        return SessionOver(0)
    if _requeues and number in OF_SCHEDULERS:
        return Requeued(0)
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def requeued_by_signals(asked: bool) -> Iterator[None]:
    """Within the context, let the signals of schedulers end this process by `Requeued`. All ranks.

    Args:
        asked: whether the job is to be requeued; otherwise the context does nothing.
    """
    global _requeues
    if not asked or threading.current_thread() is not threading.main_thread():
        yield
        return
    # Submitit requeues a job at its own signal without waiting for a checkpoint.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in OF_SCHEDULERS}
    _requeues = True
    try:
        yield
    finally:
        _requeues = False
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def asking_to_end() -> list[int]:
    """Return the signals of `HANDLED` that ask this process to end.

    Signals that are ignored, such as SIGHUP under nohup, are left out, and so are those that another library handles,
    such as SIGUSR2 under submitit.
    """
    return [number for number in HANDLED if number in ALWAYS or _is_free(signal.getsignal(number))]


def _is_free(handler: Any) -> bool:
    return handler == signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("runner.")


def end(number: int, frame: FrameType | None) -> None:
    """End the process as a signal asks, closing everything first; a repeat of the signal does not interrupt that."""
    if number != signal.SIGINT:
        signal.signal(number, _go_on)
    raise ending(number)


def _go_on(number: int, frame: FrameType | None) -> None:
    """Ignore a signal that is being acted on already."""


class Interrupt:
    """Remembers a signal that asks the run to end; a second Ctrl-C interrupts at once.

    Args:
        stop: called at the first Ctrl-C instead, where the process is to live on, as in a notebook.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self.signal = 0
        """Number of the last signal received; 0 if there was none."""
        self._stop = stop
        self._interrupted = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Remember signals within the context; on exit, the previous handlers are restored.

        Outside the main thread no handler can be installed, so signals keep the handling that they had.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._interrupted = False
        before = {number: signal.signal(number, self._receive) for number in asking_to_end()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            if self._stop is not None:
                self._stop()
                return
        self.signal = number
