"""Signals, which end training from outside.

After a signal the batch in flight is finished and a checkpoint is written before the process ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ALWAYS = (signal.SIGTERM, signal.SIGINT)
HANDLED = (*ALWAYS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to end: users and schedulers send them, and SIGHUP comes when a terminal is closed."""


def asking_to_end() -> list[int]:
    """Return those of `HANDLED` that do ask this process to end.

    Not those that are ignored, as SIGHUP is under nohup, or that someone else handles, as submitit does SIGUSR2.
    """
    return [number for number in HANDLED if number in ALWAYS or _is_free(signal.getsignal(number))]


def _is_free(handler: Any) -> bool:
    return handler == signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("runner.")


def end(number: int, frame: FrameType | None) -> None:
    """End the process as a signal asks, closing everything first; the same signal again does not interrupt that."""
    if number != signal.SIGINT:
        signal.signal(number, _go_on)
    raise Interrupt.exception(number)


def _go_on(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal, which is known."""


class Interrupt:
    """Remembers a signal that asks for the end while it is listening; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that came last, 0 while none did."""
        self._interrupted = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are remembered; the handlers from before are restored on the way out.

        Outside the main thread nothing can be installed, and the process's own handling stays.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
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
        self.signal = number

    @staticmethod
    def exception(number: int) -> BaseException:
        """Return what ends the process as the signal asked: KeyboardInterrupt, or SystemExit with 128 + its number."""
        return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
