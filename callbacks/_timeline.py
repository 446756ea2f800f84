"""Draws a timeline in Chrome's trace format from what ran at which event and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from runner import Event
from runner.callbacks._event_ranges import CLOSED_AT, OPENED_AT


class Call(NamedTuple):
    """One handler that ran at one event."""

    event: Event
    owner: str
    """Config key of its owner; empty for an entry that is not shown and only records that the event fired."""
    began: int
    """When it began, in nanoseconds of any clock."""
    ended: int


def draw(calls: Iterable[Call], rank: int) -> Iterator[dict[str, Any]]:
    """Yield trace events for the handlers, for the events that enclose them, and for the ranges between events."""
    opened: dict[str, int] = {}
    zero = ended = -1

    def slice_of(name: str, category: str, began: int, ended: int) -> dict[str, Any]:
        times = {"ts": (began - zero) / 1e3, "dur": (ended - began) / 1e3}  # microseconds
        return {"ph": "X", "name": name, "cat": category, **times, "pid": rank, "tid": 0}

    yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    for event, ran in _firings(calls):
        began = ran[0].began
        ended = ran[-1].ended
        zero = began if zero < 0 else zero
        closed = CLOSED_AT.get(event, "")
        if closed in opened:
            while (name := next(reversed(opened))) != closed:
                del opened[name]
            yield slice_of(closed, "range", opened.pop(closed), began)
        # The enclosing slice comes first: viewers nest slices that begin together by their order.
        yield slice_of(event.value, "event", began, ended)
        for one in ran:
            if one.owner:
                yield slice_of(one.owner, "callback", one.began, one.ended)
        if event in OPENED_AT:
            opened[OPENED_AT[event]] = ended
    for name, began in opened.items():
        yield slice_of(name, "range", began, ended)


def _firings(calls: Iterable[Call]) -> Iterator[tuple[Event, list[Call]]]:
    """Yield each event as often as it fired, with the calls that ran."""
    ran: list[Call] = []
    for call in calls:
        if ran and call.event is not ran[0].event:
            yield ran[0].event, ran
            ran = []
        ran.append(call)
    if ran:
        yield ran[0].event, ran
