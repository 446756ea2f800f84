"""The arguments that a config gives to its targets, each bound to the parameter that takes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from runner.config.composed import targets
from runner.config.signatures import NO_ARGUMENTS, locate
from runner.files.values import Kind, kinds_in


class Argument(NamedTuple):
    """An argument of a target."""

    path: str
    """Dotted path of its value in the config."""
    target: str
    """The `_target_` that takes it."""
    kinds: frozenset[Kind] | None
    """The kinds of value that a string may be, from the parameter; None if the target has no parameter for it."""
    value: Any


def bind(config: Any) -> Iterator[Argument]:
    """Import all targets in a config, and yield their arguments."""
    for path, section in targets(config):
        target = locate(path, section["_target_"])
        positional = section.get("_args_", [])
        if not isinstance(positional, list):
            raise ValueError(f"{path}._args_={positional!r}: must be a list")
        try:
            parameters = [*inspect.signature(target).parameters.values()]
        except (TypeError, ValueError):  # written in C
            parameters = []
        by_name = {
            item.name: item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
        }
        in_order = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
        arguments = [(f"{path}.{key}", by_name.get(key), section[key]) for key in section if key not in NO_ARGUMENTS]
        for index, value in enumerate(positional):
            arguments.append((f"{path}._args_", in_order[index] if index < len(in_order) else None, value))
        for key, parameter, value in arguments:
            yield Argument(key, section["_target_"], parameter and kinds_of(target, parameter), value)


def kinds_of(target: Any, parameter: inspect.Parameter) -> frozenset[Kind]:
    """Return the kinds of value that a string argument may be, from the annotation of its parameter."""
    code = inspect.unwrap(target.__init__ if isinstance(target, type) else target)
    holder: Any = SimpleNamespace(__annotations__={"value": parameter.annotation})
    try:
        hint = get_type_hints(holder, getattr(code, "__globals__", {}), include_extras=True)["value"]
    except Exception:
        return frozenset()  # it uses names imported only for type checkers, so none of `runner.files.values`
    return frozenset(kinds_in(hint))


def texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in an argument with their dotted paths; the items of a list have the path of the list.

    Strings of nested targets are left out, because `bind` yields their arguments separately.
    """
    if isinstance(value, Mapping) and "_target_" not in value:
        for key, item in value.items():
            yield from texts(item, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from texts(item, path)
    elif isinstance(value, str):
        yield path, value
