"""Signals that end training from outside.

After a signal, the run finishes the current batch and writes a checkpoint before the process ends.
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
"""Signals that ask a run to end. Users and schedulers send them; closing a terminal sends SIGHUP."""


def asking_to_end() -> list[int]:
    """Return the signals of `HANDLED` that ask this process to end.

    Signals that are ignored, such as SIGHUP under nohup, or handled by another library, such as SIGUSR2 under submitit,
    are left out.
    """
    return [number for number in HANDLED if number in ALWAYS or _is_free(signal.getsignal(number))]


def _is_free(handler: Any) -> bool:
    return handler == signal.SIG_DFL or str(getattr(handler, "__module__", "")).startswith("runner.")


class Interrupt:
    """Remembers a signal that asks the run to end; a second Ctrl-C interrupts at once.

    Args:
        stop: called at the first Ctrl-C instead of remembering it, if the process should live on, as in a notebook.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self.signal = 0
        """Number of the last signal received; 0 for no signal."""
        self._stop = stop
        self._had_ctrl_c = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Remember signals within the context, and restore the previous handlers on exit.

        No handler can be installed outside the main thread: there, signals keep their handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._had_ctrl_c = False
        handlers = {number: signal.signal(number, self._receive) for number in asking_to_end()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._had_ctrl_c:
                raise KeyboardInterrupt
            self._had_ctrl_c = True
            if self._stop is not None:
                self._stop()
                return
        self.signal = number
