"""End a job after a signal: cleanly if possible, and otherwise at a deadline."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from runner.distributed.session import end
from runner.distributed.signals import asking_to_end

SECOND_CTRL_C = 5.0  # seconds
at_abrupt_end: list[Callable[[int, str], None]] = []
"""Functions of an exit code and a reason, called before this process ends abruptly."""

_was_asked_to_end = False

# A forked process inherits the wakeup descriptor, and would report its signals as those of its parent.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def ended_by_signals(grace: float) -> Iterator[None]:
    """Within the context, let a signal end this process cleanly, or abruptly once the grace period is over.

    A Trainer handles signals itself during fit, and so does a sweep. But a process that waits inside torch for a stuck
    rank may run no Python handler for half an hour, so a separate thread watches the deadline. The job has `grace`
    seconds to end cleanly after a signal, and `SECOND_CTRL_C` seconds after a second Ctrl-C.
    """
    global _was_asked_to_end
    _was_asked_to_end = False
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    handlers = {number: signal.getsignal(number) for number in asking_to_end()}
    defaults = {number: handler for number, handler in handlers.items() if handler == signal.SIG_DFL}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_watch_deadline, args=(reader, grace), name="signals", daemon=True)
    thread.start()
    outer_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in defaults:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in defaults.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(outer_writer)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


def was_asked_to_end() -> bool:
    """Return whether a signal has asked the current or last job to end."""
    return _was_asked_to_end


def _watch_deadline(reader: int, grace: float) -> None:
    """Read signals as they arrive, until a 0 comes; end this process when the grace period is over."""
    global _was_asked_to_end
    poll = select.poll()
    deadline = float("inf")
    last_signal = 0
    had_ctrl_c = False
    poll.register(reader, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        if not poll.poll(None if remaining == float("inf") else max(0.0, 1000 * remaining)):
            break
        for number in os.read(reader, 64):
            if number == 0:
                return
            _was_asked_to_end |= number in asking_to_end()
            if number == signal.SIGINT and not had_ctrl_c:
                had_ctrl_c = True
            elif number in asking_to_end():
                last_signal = number
                seconds = SECOND_CTRL_C if number == signal.SIGINT else grace
                deadline = min(deadline, time.monotonic() + seconds)
    reason = "the job did not stop in time; progress since its last checkpoint is lost"
    end_abruptly(128 + last_signal, f"ended by {signal.Signals(last_signal).name}: {reason}")


def end_abruptly(code: int, reason: str) -> NoReturn:
    """Exit this process immediately, from any thread, after printing the reason. Nothing is closed."""
    print(reason, file=sys.stderr, flush=True)
    for function in at_abrupt_end:
        with suppress(Exception):
            function(code, reason)
    os._exit(code)


RETRY_SECONDS = 0.1
_has_interrupt = False


@contextmanager
def noting_interrupts() -> Iterator[None]:
    """Within the context, note each Ctrl-C that has no other handler, and delay it during the import of torch.

    While torch is imported, it swallows exceptions or aborts the process, so Ctrl-C takes effect afterwards.
    """
    global _has_interrupt
    _has_interrupt = False
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed: an import that it interrupts may fail in any way, now or later."""
    return _has_interrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _has_interrupt
    _has_interrupt = True
    if not _imports_torch(frame):
        raise KeyboardInterrupt
    timer = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _imports_torch(frame: FrameType | None) -> bool:
    """Return whether a frame, or one of its callers, executes the module `torch` itself."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False
