"""What ends training from outside: signals, and the failure of another rank.

After a signal the batch in flight is finished and a checkpoint is written before the process ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT)


class RankFailed(RuntimeError):
    """Another rank failed first; the message ends in its trace.

    Args:
        rank: which.
        trace: as that rank would print it, or how it ended where it could not say more.
    """

    def __init__(self, rank: int, trace: str) -> None:
        super().__init__(rank, trace)  # as pickle wants it
        self.rank = rank
        self.trace = trace.rstrip()
        self.__suppress_context__ = True  # what follows from the failure on this rank would bury it

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.trace}"


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
