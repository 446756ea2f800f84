"""Checks of hooks: methods with the wrong signature, and methods that would never be called."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from runner.core.destination import LoggerDestination
from runner.core.hooks import Algorithm, Callback, Hooks
from runner.libraries.foreign_hooks import HOOKS_HERE

_BASES = (Hooks, Callback, Algorithm, LoggerDestination)


def check_hooks(hook: Hooks) -> None:
    """Raise TypeError if a method of an object has the wrong signature, or would never be called."""
    kind = type(hook)
    overridden = {
        name: [*inspect.signature(method).parameters][1:]
        for base in _BASES
        for name, method in (vars(base).items() if base in kind.__mro__ else ())
        if inspect.isfunction(method) and (getattr(kind, name) is not method or name in vars(hook))
    }
    for name, arguments in overridden.items():
        check_call(hook, name, arguments, ", or rename it if it is not a hook")
    if len(overridden.keys() & {"match", "apply"}) == 1:
        rule = "apply(event, state, logger) is called when match(event, state) returns True"
        raise TypeError(f"{kind.__name__}: {rule}: define both")
    defined = (name for base in kind.__mro__ if issubclass(base, Hooks) for name in vars(base))
    for name in defined:
        if name in HOOKS_HERE and (here := HOOKS_HERE[name]) not in overridden:
            define = f"{here}({', '.join(inspect.signature(getattr(Hooks, here)).parameters)})"
            raise TypeError(
                f"{kind.__name__}.{name} would never be called: define {define}, or rename it if it is not a hook"
            )
    # `state_dict` alone is not enough: a hook that is never called has no state. The base classes themselves are
    # allowed, as hooks that do nothing.
    if not overridden.keys() - {"state_dict", "load_state_dict"} and kind not in _BASES:
        raise TypeError(
            f"{kind.__name__} would never be called: it has no method named after an event, such as "
            "batch_end(self, state, logger); runner.Event has them all"
        )


def check_call(owner: object, name: str, arguments: Sequence[str], remedy: str = "") -> None:
    """Raise TypeError if a method of an object cannot be called with the given arguments."""
    method = getattr(owner, name)
    kind = type(owner).__name__
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise TypeError(f"{kind}.{name} would do nothing when called: define it without yield or async")
    try:
        # The decorated method's own signature: the function that it wraps may take other arguments.
        inspect.signature(method, follow_wrapped=False).bind(*arguments)
    except ValueError:
        return  # implemented in C, without a signature
    except TypeError:
        called, defined = (f"{name}({', '.join(names)})" for names in (arguments, ["self", *arguments]))
        raise TypeError(f"{kind}.{name} cannot be called as {called}: define {defined}{remedy}") from None
