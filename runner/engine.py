"""Dispatch of events to algorithms, callbacks and logger destinations, through a table that is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from runner.event import Event
from runner.failures import add_raiser
from runner.hooks import Algorithm, Handler, Hooks
from runner.logger import Logger
from runner.terminal import describe_time

if TYPE_CHECKING:
    from runner.state import State


# Where algorithms have done their part in one of these, weights are final: the others only hear that time has passed.
_TOLD_LATER = (Event.EPOCH_END, Event.ITERATION_END)


class Engine:
    """Runs whoever listens to an event, in order: algorithms, callbacks, logger destinations.

    The table of handlers is made here once, from the methods that are overridden; an event to which nobody listens
    costs one look-up. At INIT the order is destinations, callbacks, algorithms, so that everyone can log; on events
    that close a bracket algorithms run in reverse.

    Args:
        state: the run's state, with `algorithms` (already ordered by `order_algorithms`) and `callbacks` in it.
        logger: the run's logger with its destinations.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self.state = state
        self.logger = logger
        self._closed = False
        self._table: dict[str, tuple[Handler, ...]] = {event: tuple(self._handlers(event)) for event in Event}
        self.on = Firing({event: partial(self.run_event, event) if self._table[event] else _nobody for event in Event})

    def run_event(self, event: Event | str, hooks: Sequence[str] | None = None) -> None:
        """Call every handler of an event, given as `Event` or by name in either case.

        Args:
            event: which.
            hooks: config keys of those alone who are to hear it; None: everyone.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: there is no such event.
        """
        try:
            handlers = self._table[event]
        except KeyError:
            handlers = self._table[Event(event)]
        if hooks is not None:
            handlers = tuple(one for one in handlers if _owner(one).config_key in hooks)
        if handlers:
            handler = None
            try:
                for handler in handlers:
                    handler(self.state, self.logger)
            except BaseException as error:
                self._annotate(error, handler, Event(event))
                if event in _TOLD_LATER and handler is not None and not isinstance(_owner(handler), Algorithm):
                    rest = handlers[handlers.index(handler) :]
                    self.state.unheard = {str(event): [_owner(one).config_key for one in rest]}
                raise

    def tell_unheard(self) -> None:
        """Fire the event in which a run failed for those who had not heard it, now that it goes on."""
        unheard, self.state.unheard = self.state.unheard, {}
        for event, hooks in unheard.items():
            self.run_event(event, hooks)

    def listeners(self, event: Event | str) -> list[Hooks]:
        """Return who acts at an event, in the order in which they run."""
        return [_owner(handler) for handler in self._table[Event(event)]]

    def close(self) -> None:
        """Close callbacks, then algorithms, then destinations, each once and all of them, whatever fails on the way.

        With `state.error` set, failures here become notes on it; otherwise the first of them is raised at the end,
        the others being its notes. A closed engine refuses events.
        """
        if self._closed:
            return
        self._closed = True
        state = self.state
        first = state.error
        everyone: list[Hooks] = [*state.callbacks, *state.algorithms, *self.logger.destinations]
        steps: list[tuple[str, str, Callable[[], None]]] = [
            *((one.config_key, "close", partial(one.close, state, self.logger)) for one in state.callbacks),
            *((one.config_key, "close", partial(one.close, state, self.logger)) for one in state.algorithms),
            ("logger", "flush", self.logger.flush),
            *((one.config_key, "close", partial(one.close, state, self.logger)) for one in self.logger.destinations),
            *((one.config_key, "post_close", one.post_close) for one in everyone),
            ("logger", "close", self.logger.close),
        ]
        for owner, method, step in steps:
            try:
                step()
            except BaseException as error:
                if first is None:
                    first = error
                    add_raiser(error, owner)
                    error.add_note(f"raised by {owner}.{method} while closing; everything else was closed all the same")
                else:
                    first.add_note(f"while closing, {owner}.{method} raised {type(error).__name__}: {error}")
        self._table = _ClosedTable()
        for event in Event:
            setattr(self.on, event.value, partial(self.run_event, event))
        if first is not None and first is not state.error:
            raise first

    def _handlers(self, event: Event) -> Iterator[Handler]:
        algorithms: Sequence[Hooks] = self.state.algorithms
        kinds = [algorithms, self.state.callbacks, self.logger.destinations]
        if event.closes_bracket:
            kinds[0] = algorithms[::-1]
        if event is Event.INIT:
            kinds.reverse()
        for one in (one for kind in kinds for one in kind):
            handler = _handler(one, event)
            if handler is not None:
                for watcher in self.state.callbacks:
                    handler = watcher.wrap_handler(handler, one, event)
                yield handler

    def _annotate(self, error: BaseException, handler: Handler | None, event: Event) -> None:
        """Add to an exception who raised it, at which event and when: as facts, and as a note of the same."""
        name = "?" if handler is None else _owner(handler).config_key or type(_owner(handler)).__name__
        now = self.state.timestamp
        add_raiser(error, name, event, now)
        error.add_note(f"raised by {name!r} at {event.name}, {describe_time(now)}")


def _nobody() -> None:
    """Fire an event to which nobody listens."""


class Firing:
    """One function per event that fires it: `on.batch_start()` is `run_event(Event.BATCH_START)`, looked up already.

    The loops call these, for an event that nobody listens to costs an empty call there.
    """

    __slots__ = tuple(event.value for event in Event)

    def __init__(self, functions: dict[Event, Callable[[], None]]) -> None:
        for event, function in functions.items():
            setattr(self, event.value, function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[], None]: ...


class _ClosedTable(dict[str, tuple[Handler, ...]]):
    def __missing__(self, event: str) -> NoReturn:
        raise RuntimeError(f"event={str(event)!r} came after close(); make a new Trainer (an error closes it too)")


def overrides(one: Hooks, name: str) -> bool:
    """Whether an object has its own method for an event, or its own of another method of `Hooks`."""
    return name in vars(one) or getattr(type(one), name) is not getattr(Hooks, name)


def _handler(one: Hooks, event: Event) -> Handler | None:
    """Return the method of an object that is to run at an event, or None when it overrides none."""
    if any(overrides(one, name) for name in ("run_event", "match", "apply")):
        return partial(one.run_event, event)
    return getattr(one, event.value) if overrides(one, event) else None


def _owner(handler: Handler) -> Hooks:
    # A bound method may have a `__wrapped__` too, of its decorator: it is no wrapper of ours.
    while not hasattr(handler, "__self__") and hasattr(handler, "__wrapped__"):
        handler = handler.__wrapped__  # type: ignore[attr-defined]
    method = handler.func if isinstance(handler, partial) else handler
    return getattr(method, "__self__", Hooks())


@contextmanager
def evaluation_weights(state: State) -> Iterator[None]:
    """Inside, the model holds the weights to evaluate and to export: an algorithm's average, if one keeps it."""
    with ExitStack() as stack:
        for algorithm in state.algorithms:
            stack.enter_context(algorithm.evaluation_weights(state))
        yield
