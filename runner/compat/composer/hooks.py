"""Callbacks and algorithms whose hooks get Composer's view of the state, of time and of the logger."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runner.compat.composer.logger import Logger
from runner.compat.composer.state import State
from runner.compat.composer.time import Time, Timestamp
from runner.core import hooks as ours
from runner.core import logger, state
from runner.timing.event import Event

_CALLED_WITH_STATE = (*(event.value for event in Event), "run_event", "match", "apply", "close")

_REFUSED = {
    "backwards_create_graph": "compute higher derivatives with torch.autograd.grad in Model.training_step",
    "find_unused_parameters": "on several ranks each trainable parameter needs a gradient: freeze those without one",
}


def _replace(cls: type, name: str, adapt: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    """Replace a method that a class or one of its mixins defines with its adapted form, once."""
    method = getattr(cls, name)
    if inspect.isfunction(method) and method is not getattr(ours.Hooks, name) and not hasattr(method, "is_adapted"):
        adapted = functools.wraps(method)(adapt(method, name))
        adapted.__signature__ = inspect.signature(method)  # type: ignore[attr-defined] # a run checks it
        adapted.is_adapted = True  # type: ignore[attr-defined]
        setattr(cls, name, adapted)


def _pass_views(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a hook that gets views of the state and the logger, for the event that calls it."""

    def adapted(self: Any, *arguments: Any, **named: Any) -> Any:
        event = arguments[0] if arguments and isinstance(arguments[0], Event) else name
        return method(self, *(_view(argument, event) for argument in arguments), **named)

    return adapted


def _view(argument: Any, event: str) -> Any:
    if isinstance(argument, state.State):
        return State(argument, event)
    return Logger(argument) if isinstance(argument, logger.Logger) else argument


# A checkpoint holds tensors, numbers, strings, lists and dicts: times become dicts with one of these keys.
_TIME = "runner.compat.composer.Time"
_TIMESTAMP = "runner.compat.composer.Timestamp"


def _encode_result(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda self: _encode(method(self))


def _decode_state(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda self, state, *args, **kwargs: method(self, _decode(state), *args, **kwargs)


def _encode(value: Any) -> Any:
    if isinstance(value, Time):
        return {_TIME: str(value)}
    if isinstance(value, Timestamp):
        return {_TIMESTAMP: value.state_dict()}
    if type(value) is dict:
        return {key: _encode(item) for key, item in value.items()}
    return type(value)(_encode(item) for item in value) if type(value) in (list, tuple) else value


def _decode(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TIME}:
        return Time.from_timestring(value[_TIME])
    if value.keys() == {_TIMESTAMP}:
        return Timestamp.from_state_dict(value[_TIMESTAMP])
    return {key: _decode(item) for key, item in value.items()}


class _ComposerHooks(ours.Hooks):
    """Passes views to the hooks that a subclass defines; events without a hook get no listener."""

    if TYPE_CHECKING:  # subclasses may call it with their views

        def run_event(self, event: Event, state: Any, logger: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, remedy in _REFUSED.items():
            if hasattr(cls, name):
                raise TypeError(f"{cls.__name__}.{name} has no counterpart here: leave it out; {remedy}")
        for name in _CALLED_WITH_STATE:
            _replace(cls, name, _pass_views)
        _replace(cls, "state_dict", _encode_result)
        _replace(cls, "load_state_dict", _decode_state)


class Callback(_ComposerHooks, ours.Callback):
    """A callback written for Composer."""


class Algorithm(_ComposerHooks, ours.Algorithm):
    """An algorithm written for Composer, with `match` and `apply`, or with a method for each event."""
