"""Signals during training: the batch in flight is finished and a checkpoint is written before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Remembers a SIGTERM or Ctrl-C while it is listening; a second Ctrl-C interrupts at once."""

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
        before = {number: signal.signal(number, self._receive) for number in HANDLED}
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
