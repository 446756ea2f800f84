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


# After algorithms have handled one of these events, nothing changes the weights: callbacks and destinations only
# observe. So if one of these fails, a resumed run can call it and the rest.
_RESUMABLE_EVENTS = (Event.EPOCH_END, Event.ITERATION_END)


class Engine:
    """Calls the hooks that listen to an event, in order: algorithms, callbacks, logger destinations.

    The constructor builds the table of handlers once, from the methods that hooks override. An event without listeners
    costs one call of an empty function. At INIT the order is destinations, callbacks, algorithms, so that all of them
    can log. At events such as AFTER_FORWARD (see `Event.closes_bracket`), algorithms run in reverse order.

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
        """A function for each event: `on.batch_start()` is `run_event(Event.BATCH_START)` without the lookup. The
        functions are attributes of a class, because Python looks these up faster than attributes of an instance."""
        for event, handlers in self._table.items():
            setattr(self.on, str(event), self._make_fire(Event(event), handlers))

    def run_event(self, event: Event | str, hooks: Sequence[str] | None = None) -> None:
        """Call every handler of an event.

        Args:
            event: the event, as an `Event` or by name in lower or upper case.
            hooks: the config keys of the hooks to call; None: all hooks that listen to the event.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: no event has that name.
        """
        handlers = self._table[Event(event)]
        if hooks is not None:
            handlers = tuple(handler for handler in handlers if _owner(handler).config_key in hooks)
        self._make_fire(Event(event), handlers)()

    def fire_unhandled(self) -> None:
        """Fire the event at which the run failed before it was resumed, for the hooks that have not handled it yet."""
        unfinished_hooks, self.state.unfinished_hooks = self.state.unfinished_hooks, {}
        for event, hooks in unfinished_hooks.items():
            self.run_event(event, hooks)

    def listeners(self, event: Event | str) -> list[Hooks]:
        """Return the hooks that act at an event, in the order in which they run."""
        return [_owner(handler) for handler in self._table[Event(event)]]

    def check_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self._closed:
            raise RuntimeError(
                "this Trainer is closed, by close(), a `with` block that is over, or an error; make a new one"
            )

    def close(self) -> None:
        """Close callbacks, then algorithms, then destinations: all of them, each once, even if some fail.

        If `state.error` is set, errors from closing are added to it as notes. Otherwise the first of them is raised at
        the end, with the others as notes. A closed engine refuses events.
        """
        if self._closed:
            return
        self._closed = True
        state = self.state
        first_error = state.error
        hooks: list[Hooks] = [*state.callbacks, *state.algorithms]
        steps: list[tuple[str, str, Callable[[], None]]] = [
            *((hook.config_key, "close", partial(hook.close, state, self.logger)) for hook in hooks),
            ("logger", "flush", self.logger.flush),
            *((hook.config_key, "close", partial(hook.close, state, self.logger)) for hook in self.logger.destinations),
            *((hook.config_key, "post_close", hook.post_close) for hook in (*hooks, *self.logger.destinations)),
            ("logger", "close", self.logger.close),
        ]
        for owner, method, step in steps:
            try:
                step()
            except BaseException as error:
                if first_error is None:
                    first_error = error
                    add_raiser(error, owner)
                    error.add_note(f"raised by {owner}.{method} while closing; everything else was closed")
                else:
                    first_error.add_note(f"while closing, {owner}.{method} raised {type(error).__name__}: {error}")
        self._table = _ClosedTable()
        for event in Event:
            setattr(self.on, event.value, partial(self.run_event, event))
        if first_error is not None and first_error is not state.error:
            raise first_error

    def _make_table(self) -> dict[str, tuple[Handler, ...]]:
        """Return the handlers of each event, in the order in which they run."""
        algorithms, callbacks, destinations = self.state.algorithms, self.state.callbacks, self.logger.destinations
        handlers_of = {id(hook): _find_handlers(hook) for hook in (*algorithms, *callbacks, *destinations)}
        wrappers = [callback for callback in callbacks if overrides(callback, "wrap_handler", Callback)]

        def handlers(event: Event) -> Iterator[Handler]:
            kinds = (algorithms[::-1] if event.closes_bracket else algorithms, callbacks, destinations)
            for hook in chain(*(kinds[::-1] if event is Event.INIT else kinds)):
                if (handler := handlers_of[id(hook)].get(event)) is not None:
                    for wrapper in wrappers:
                        handler = wrapper.wrap_handler(handler, hook, event)
                    yield handler

        return {event: tuple(handlers(event)) for event in Event}

    def _make_fire(self, event: Event, handlers: Sequence[Handler]) -> Callable[[], None]:
        """Return the function that calls the handlers of an event."""
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
        """Record on an exception which hook raised it, and at which event and time, as facts and as a note."""
        name = "?" if at is None else _owner(at).config_key or type(_owner(at)).__name__
        now = self.state.timestamp
        add_raiser(error, name, event, now)
        error.add_note(f"raised by {name!r} at {event.name}, {describe_time(now)}")
        if event in _RESUMABLE_EVENTS and at is not None and not isinstance(_owner(at), Algorithm):
            unfinished = handlers[handlers.index(at) :]
            self.state.unfinished_hooks = {str(event): [_owner(handler).config_key for handler in unfinished]}


class _ClosedTable(dict[str, tuple[Handler, ...]]):
    def __missing__(self, event: str) -> NoReturn:
        raise RuntimeError(f"event={str(event)!r} came after close(); make a new Trainer (an error closes it too)")


def overrides(hook: Hooks, name: str, base: type[Hooks] = Hooks) -> bool:
    """Return whether an object overrides a method of a base class, in its class or on the object itself."""
    return name in vars(hook) or getattr(type(hook), name) is not getattr(base, name)


def _find_handlers(hook: Hooks) -> dict[Event, Handler]:
    """Return an object's handlers by event."""
    if any(overrides(hook, name) for name in ("run_event", "match", "apply")):
        return {event: partial(hook.run_event, event) for event in Event}
    return {event: getattr(hook, event.value) for event in Event if overrides(hook, event)}


def _owner(handler: Handler) -> Hooks:
    # Bound methods are not unwrapped: `__wrapped__` of a decorated method is a plain function without `__self__`.
    while not hasattr(handler, "__self__") and hasattr(handler, "__wrapped__"):
        handler = handler.__wrapped__  # type: ignore[attr-defined]
    return getattr(handler.func if isinstance(handler, partial) else handler, "__self__", Hooks())


def evaluation_weights(state: State) -> AbstractContextManager[Any]:
    """Put the weights to evaluate and export, such as an algorithm's average, into the model until the context ends."""
    with ExitStack() as stack:
        for algorithm in state.algorithms:
            stack.enter_context(algorithm.evaluation_weights(state))
        return stack.pop_all()
