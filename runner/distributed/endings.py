"""How a signal ends a process that works on a job: in order where it can, in time where it cannot."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runner.distributed.signals import asking_to_end, end

SECOND_CTRL_C = 5.0  # seconds

# A process that is forked has our handlers, and would report its own signals as ours.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def ended_by_signals(grace: float) -> Iterator[None]:
    """Inside, a signal ends this process through all that has to be closed, or without it where that lasts too long.

    While a Trainer fits it hears signals by itself, and so does a sweep. But what waits in torch for a rank that is
    stuck hears nothing for half an hour, which is why a thread counts along.

    Args:
        grace: seconds after a signal in which a job may end in order; after a second Ctrl-C it is `SECOND_CTRL_C`.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    before = {number: signal.getsignal(number) for number in asking_to_end()}
    before = {number: handler for number, handler in before.items() if handler == signal.SIG_DFL}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_count_along, args=(reader, grace), name="signals", daemon=True)
    thread.start()
    outer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(outer)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


def _count_along(reader: int, grace: float) -> None:
    """Read signals as the system delivers them, until a 0 comes; end the process where the time after one is up."""
    poll = select.poll()
    deadline = float("inf")
    last = 0
    interrupted = False
    poll.register(reader, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        if not poll.poll(None if left == float("inf") else max(0.0, 1000 * left)):
            break
        for number in os.read(reader, 64):
            if number == 0:
                return
            if number == signal.SIGINT and not interrupted:
                interrupted = True
            elif number in asking_to_end():
                last = number
                seconds = SECOND_CTRL_C if number == signal.SIGINT else grace
                deadline = min(deadline, time.monotonic() + seconds)
    reason = "what went on did not end in time, and is not saved"
    print(f"ended by {signal.Signals(last).name}: {reason}", file=sys.stderr, flush=True)
    os._exit(128 + last)
