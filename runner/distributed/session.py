"""Ends of a run that are no failure: it stops between two batches as if by a signal, and can be resumed."""

from __future__ import annotations

from runner.distributed.signals import Interrupt

SESSION_OVER = 1000
"""Stands where the number of a signal would, when the time of a session is over; no signal has this number."""


class SessionOver(SystemExit):
    """The time of this session is over: training has stopped between two batches, and can be resumed. Exit code 0."""

    status = "PAUSED"
    """Status of the run in `result.json`."""


class Pruned(SessionOver):
    """A job of a sweep was not worth training further: it has stopped between two batches, and can be revived."""

    status = "PRUNED"


def ending(number: int) -> BaseException:
    """Return the exception to end training with, for the number of a signal or `SESSION_OVER`."""
    return SessionOver(0) if number == SESSION_OVER else Interrupt.exception(number)
