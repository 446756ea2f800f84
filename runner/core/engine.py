"""Dispatch of events to algorithms, callbacks and logger destinations, through a table that is built once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from runner.core.hooks import Algorithm, Callback, Handler, Hooks
from runner.core.logger import Logger
from runner.failures.facts import add_raiser
from runner.terminal.console import describe_time
from runner.timing.event import Event

if TYPE_CHECKING:
    from runner.core.state import State


# Once algorithms have handled one of these events, weights are final. The remaining hooks only observe that time has
# passed, so a resumed run can still call those that a failure left out.
_TOLD_LATER = (Event.EPOCH_END, Event.ITERATION_END)


class Engine:
    """Calls the hooks that listen to an event, in order: algorithms, callbacks, logger destinations.

    The constructor builds the table of handlers once, from the methods that hooks override. An event without listeners
    costs one lookup. At INIT the order is destinations, callbacks, algorithms, so that all of them can log. On events
    that close a bracket, algorithms run in reverse order.

    Args:
        state: the run's state, with its callbacks, and its algorithms in the order from `order_algorithms`.
        logger: the run's logger, with its destinations.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self.state = state
        self.logger = logger
        self._closed = False
        self._table = self._make_table()
        self.on: Any = type("on", (), {})
        """A function for each event that fires it: `on.batch_start()` is `run_event(Event.BATCH_START)` without the
        lookup. They stand on a class, where Python finds them faster than on an object."""
        for event, handlers in self._table.items():
            setattr(self.on, str(event), self._firing(Event(event), handlers))

    def run_event(self, event: Event | str, hooks: Sequence[str] | None = None) -> None:
        """Call every handler of an event.

        Args:
            event: the event, as an `Event` or by name in lower or upper case.
            hooks: the config keys of the hooks to call; None: all hooks that listen to the event.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: there is no event of that name.
        """
        handlers = self._table[Event(event)]
        if hooks is not None:
            handlers = tuple(one for one in handlers if _owner(one).config_key in hooks)
        self._firing(Event(event), handlers)()

    def fire_unhandled(self) -> None:
        """Fire the event in which a resumed run failed, for the hooks that have not handled it yet."""
        unheard, self.state.unheard = self.state.unheard, {}
        for event, hooks in unheard.items():
            self.run_event(event, hooks)

    def listeners(self, event: Event | str) -> list[Hooks]:
        """Return the hooks that act at an event, in the order in which they run."""
        return [_owner(handler) for handler in self._table[Event(event)]]

    def close(self) -> None:
        """Close callbacks, then algorithms, then destinations: all of them, each once, even if some fail.

        If `state.error` is set, failures to close become notes on it. Otherwise the first failure is raised at the
        end, with the others as its notes. A closed engine refuses events.
        """
        if self._closed:
            return
        self._closed = True
        state = self.state
        first = state.error
        watching: list[Hooks] = [*state.callbacks, *state.algorithms]
        steps: list[tuple[str, str, Callable[[], None]]] = [
            *((one.config_key, "close", partial(one.close, state, self.logger)) for one in watching),
            ("logger", "flush", self.logger.flush),
            *((one.config_key, "close", partial(one.close, state, self.logger)) for one in self.logger.destinations),
            *((one.config_key, "post_close", one.post_close) for one in (*watching, *self.logger.destinations)),
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

    def _make_table(self) -> dict[str, tuple[Handler, ...]]:
        kinds = (self.state.algorithms, self.state.callbacks, self.logger.destinations)
        own = {id(one): _own_handlers(one) for one in chain(*kinds)}
        watchers = [one for one in kinds[1] if overrides(one, "wrap_handler", Callback)]

        def handlers(event: Event) -> Iterator[Handler]:
            ordered = (kinds[0][::-1] if event.closes_bracket else kinds[0], *kinds[1:])
            for one in chain(*(ordered[::-1] if event is Event.INIT else ordered)):
                if (handler := own[id(one)].get(event)) is not None:
                    for watcher in watchers:
                        handler = watcher.wrap_handler(handler, one, event)
                    yield handler

        return {event: tuple(handlers(event)) for event in Event}

    def _firing(self, event: Event, handlers: Sequence[Handler]) -> Callable[[], None]:
        """Return a function that calls the handlers of an event."""
        state = self.state
        logger = self.logger

        def fire() -> None:
            handler = None
            try:
                for handler in handlers:
                    handler(state, logger)
            except BaseException as error:
                self._note(error, event, handlers, handler)
                raise

        return fire if handlers else lambda: None

    def _note(self, error: BaseException, event: Event, handlers: Sequence[Handler], at: Handler | None) -> None:
        """Add to an exception the hook that raised it, the event and the time, both as facts and as a note."""
        name = "?" if at is None else _owner(at).config_key or type(_owner(at)).__name__
        now = self.state.timestamp
        add_raiser(error, name, event, now)
        error.add_note(f"raised by {name!r} at {event.name}, {describe_time(now)}")
        if event in _TOLD_LATER and at is not None and not isinstance(_owner(at), Algorithm):
            rest = handlers[handlers.index(at) :]
            self.state.unheard = {str(event): [_owner(one).config_key for one in rest]}


class _ClosedTable(dict[str, tuple[Handler, ...]]):
    def __missing__(self, event: str) -> NoReturn:
        raise RuntimeError(f"event={str(event)!r} came after close(); make a new Trainer (an error closes it too)")


def overrides(one: Hooks, name: str, base: type[Hooks] = Hooks) -> bool:
    """Return whether an object overrides a method of a base class, in its class or on the object itself."""
    return name in vars(one) or getattr(type(one), name) is not getattr(base, name)


def _own_handlers(one: Hooks) -> dict[Event, Handler]:
    """Return the methods that an object runs, by event."""
    if any(overrides(one, name) for name in ("run_event", "match", "apply")):
        return {event: partial(one.run_event, event) for event in Event}
    return {event: getattr(one, event.value) for event in Event if overrides(one, event)}


def _owner(handler: Handler) -> Hooks:
    # A bound method may carry its decorator's `__wrapped__`, a plain function without `__self__`: leave that alone.
    while not hasattr(handler, "__self__") and hasattr(handler, "__wrapped__"):
        handler = handler.__wrapped__  # type: ignore[attr-defined]
    return getattr(handler.func if isinstance(handler, partial) else handler, "__self__", Hooks())


def evaluation_weights(state: State) -> AbstractContextManager[Any]:
    """Put the weights to evaluate and export into the model: an algorithm's average of them, if one keeps it."""
    with ExitStack() as stack:
        for algorithm in state.algorithms:
            stack.enter_context(algorithm.evaluation_weights(state))
        return stack.pop_all()
