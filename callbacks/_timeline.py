"""Converts the times of calls at events into a timeline in Chrome's trace format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from runner import Event
from runner.callbacks._event_ranges import CLOSED_AT, OPENED_AT


class Call(NamedTuple):
    """A call of a handler at an event."""

    event: Event
    owner: str
    """Config key of the handler's owner; empty for a hidden entry, which only records that the event fired."""
    began: int
    """The time at which it began, in nanoseconds of any clock."""
    ended: int


def draw(calls: Iterable[Call], rank: int) -> Iterator[dict[str, Any]]:
    """Yield trace events for the handlers, for the events that enclose them, and for the ranges between events."""
    opened: dict[str, int] = {}
    zero = ended = -1

    def slice_of(name: str, category: str, began: int, ended: int) -> dict[str, Any]:
        times = {"ts": (began - zero) / 1e3, "dur": (ended - began) / 1e3}  # microseconds
        return {"ph": "X", "name": name, "cat": category, **times, "pid": rank, "tid": 0}

    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for event, handlers in _firings(calls):
        began = handlers[0].began
        ended = handlers[-1].ended
        zero = began if zero < 0 else zero
        closed = CLOSED_AT.get(event, "")
        if closed in opened:
            while (name := next(reversed(opened))) != closed:
                del opened[name]
            yield slice_of(closed, "range", opened.pop(closed), began)
        # The enclosing slice comes first, because viewers nest slices that begin at the same time by their order.
        yield slice_of(event.value, "event", began, ended)
        for call in handlers:
            if call.owner:
                yield slice_of(call.owner, "callback", call.began, call.ended)
        if event in OPENED_AT:
            opened[OPENED_AT[event]] = ended
    for name, began in opened.items():
        yield slice_of(name, "range", began, ended)


def _firings(calls: Iterable[Call]) -> Iterator[tuple[Event, list[Call]]]:
    """Yield the event and the calls of each firing: successive calls at the same event."""
    firing: list[Call] = []
    for call in calls:
        if firing and call.event is not firing[0].event:
            yield firing[0].event, firing
            firing = []
        firing.append(call)
    if firing:
        yield firing[0].event, firing
