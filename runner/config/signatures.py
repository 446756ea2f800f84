"""Checks a config section against the signature of its `_target_`, before the target is called."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import hydra.utils
import yaml

from runner.cli.foreign import about_foreign
from runner.cli.nearest import Advice, nearest
from runner.failures.errors import NoSuchArgument, WrongKey
from runner.failures.tracebacks import is_of_user
from runner.files.addresses import keep_secret
from runner.files.values import Kind, kinds_in
from runner.libraries.targets import find_in_working_directory, prepare_import

# Hydra logs every target that it cannot find before it raises; the runner reports the error once, itself.
logging.getLogger(hydra.utils.__name__).setLevel(logging.CRITICAL)

_SCALARS: dict[Any, tuple[type, ...]] = {
    NoneType: (NoneType,),
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
}
# Keys of a section that are not arguments: Hydra's own, and an optimizer's rules for `runner.optim.ParamGroups`.
NO_ARGUMENTS = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_", "param_groups")
_COLLECTIONS: dict[Any, Any] = {list: list, tuple: list, Sequence: list | str, dict: Mapping, Mapping: Mapping}
_WORDS: dict[Any, str] = {
    NoneType: "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    **dict.fromkeys((list, tuple, Sequence), "a list"),
    **dict.fromkeys((dict, Mapping), "a section of keys and values"),
}

_GIVEN_IN_TRAINING = ("params", "model", "optimizer", "timestamp")


def check_signature(path: str, section: Mapping[str, Any], supplied: Iterable[str] = ()) -> None:
    """Check that a section's keys and values fit the signature of its target.

    `supplied` names the arguments that code supplies; the section must not set them.
    """
    name = section["_target_"]
    target = locate(path, name)
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return  # written in C, without a signature; the target checks its arguments when it is called
    keys = [key for key in section if key not in NO_ARGUMENTS]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [key for key, item in parameters.items() if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    for key in keys:
        if key in supplied:
            raise WrongKey(f"{path}.{key}", "is built from the other groups and cannot be set here")
    if not open_ended and (unknown := [key for key in keys if key not in named]):
        foreign = about_foreign(f"{path}.{unknown[0]}", section[unknown[0]])
        near = foreign or nearest(unknown[0], [name for name in named if name not in supplied])
        raise NoSuchArgument([f"{path}.{key}" for key in unknown], f"{name} has no such argument; " + near)
    check_null(path, section, parameters)
    _check_types(path, section, target, {key: parameters[key] for key in keys if key in named})
    if section.get("_partial_") or section.get("_args_"):
        return
    for key, parameter in parameters.items():
        kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        required = parameter.default is parameter.empty and parameter.kind in kinds
        if required and key not in keys and key not in supplied:
            if key in _GIVEN_IN_TRAINING and path.partition(".")[0] in ("optimizer", "scheduler"):
                raise WrongKey(path, f"{name} gets {key} only during training: add '_partial_: true'")
            is_part = inspect.isfunction(target) and "." in path  # such as model.loss_fn
            later = f"; if it is passed in training, add +{path}._partial_=true" if is_part else ""
            raise WrongKey(f"{path}.{key}", f"{name} needs this argument; set it with +{path}.{key}=...{later}")


def check_null(path: str, section: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Check that no argument that may be None is set to the text 'None', which in YAML is written null."""
    for key, value in section.items():
        if value == "None" and key in parameters and parameters[key].default is None:
            raise WrongKey(f"{path}.{key}", Advice("write null for no value").with_facts(meant="null"), repr(value))


def taken_as_options(path: str, section: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section that its target takes as `**options` rather than as named arguments."""
    try:
        parameters = inspect.signature(locate(path, section["_target_"])).parameters
    except (TypeError, ValueError):
        return []
    named = [key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    return [key for key in section if key not in named and key not in NO_ARGUMENTS]


def default_of(path: str, section: Mapping[str, Any], key: str) -> Any:
    """Return the default of an argument of a section's target; None if the signature is unknown or lacks it."""
    try:
        return inspect.signature(locate(path, section["_target_"])).parameters[key].default
    except (TypeError, ValueError, KeyError):
        return None


def locate(path: str, target: Any) -> Callable[..., Any]:
    """Return the class or function with the dotted path in a `_target_`."""
    key = f"{path}._target_"
    if not isinstance(target, str) or not target.strip("."):
        raise WrongKey(key, "must name a class or function, such as 'my_module.MyClass'", repr(target))
    find_in_working_directory(target)
    try:
        prepare_import(target)
        located = hydra.utils.get_object(target)
    except Exception as error:
        raise WrongKey(key, _why_not_found(target, error.__cause__ or error), repr(target)) from None
    if not callable(located):
        raise WrongKey(key, f"is a {type(located).__name__}, not a class or function", repr(target))
    return located


def _why_not_found(target: str, cause: BaseException) -> str:
    """Return the reason why a target cannot be imported: a missing module, package or name, or an exception."""
    parts = target.split(".")
    if len(parts) == 1:
        return "needs its module too, as in torch.optim.AdamW"
    if not isinstance(cause, ModuleNotFoundError | AttributeError):
        frames = reversed(traceback.extract_tb(cause.__traceback__))
        line = next((f" [{frame.filename}:{frame.lineno}]" for frame in frames if is_of_user(frame.filename)), "")
        return f"importing it failed with {type(cause).__name__}: {cause}{line}"
    if isinstance(cause, ModuleNotFoundError) and not f"{target}.".startswith(f"{cause.name}."):
        return f"importing it needs the package {cause.name!r}, which is not installed"
    for depth in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:depth])
        try:
            holder = hydra.utils.get_object(module)
        except Exception:
            continue
        near = nearest(parts[depth], _callables(holder))
        whole = {"allowed": tuple(f"{module}.{name}" for name in near.allowed)} if depth == len(parts) - 1 else {}
        meant = ".".join([module, near.meant, *parts[depth + 1 :]]) if near.meant else ""
        return (Advice(f"{module} has no {parts[depth]!r}; ") + near).with_facts(meant=meant, **whole)
    return f"there is no module {parts[0]!r}, neither installed nor in the working directory"


def _callables(module: Any) -> list[str]:
    """Return the names of the public classes and functions in a module or class."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    home = getattr(module, "__name__", "")
    public = [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))]
    return [name for name in public if str(getattr(getattr(module, name), "__module__", home)).startswith(home)]


def _check_types(
    path: str, section: Mapping[str, Any], target: Any, parameters: Mapping[str, inspect.Parameter]
) -> None:
    try:
        hints = get_type_hints(target.__init__ if isinstance(target, type) else target, include_extras=True)
    except Exception:
        return  # annotations use names imported only for type checkers
    for key, parameter in parameters.items():
        value = section[key]
        if isinstance(value, str) and key in hints and Kind.SECRET in kinds_in(hints[key]):
            keep_secret(value)
        is_target = isinstance(value, Mapping) and "_target_" in value
        if key in hints and not is_target and value != parameter.default and not _fits(value, hints[key]):
            hint = parameter.annotation
            shown = " or ".join(dict.fromkeys(_in_words(hints[key])))
            shown = shown or (hint if isinstance(hint, str) else inspect.formatannotation(hint))
            if isinstance(value, str) and re.fullmatch(r"[\w.+-]+", value) and _fits(yaml.safe_load(value), hints[key]):
                shown += "; an environment variable is text, which ${oc.decode:${oc.env:NAME}} parses"
            reason = Advice(f"{section['_target_']} takes {shown}").with_facts(allowed=_listed(hints[key]))
            raise WrongKey(f"{path}.{key}", reason, repr(value))


def _listed(hint: Any) -> tuple[str, ...]:
    """Return all values that an annotation allows, if they can be listed."""
    origin, hint = _without_marks(hint)
    if origin in (Union, UnionType):
        parts = [_listed(part) for part in get_args(hint)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    plain = {bool: ("true", "false"), NoneType: ("null",), Literal: tuple(map(str, get_args(hint)))}
    return plain.get(origin, ())


def _in_words(hint: Any) -> Iterator[str]:
    """Yield the names of config types that match an annotation, except those that a config cannot represent."""
    origin, hint = _without_marks(hint)
    if origin in (Union, UnionType):
        for part in get_args(hint):
            yield from _in_words(part)
    elif origin is Literal:
        yield from map(repr, get_args(hint))
    elif origin in _WORDS:
        yield _WORDS[origin]


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value fits an annotation; True if that cannot be determined."""
    origin, hint = _without_marks(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in _SCALARS:
        return isinstance(value, _SCALARS[origin]) and (origin is bool or not isinstance(value, bool))
    if origin in _COLLECTIONS:
        return isinstance(value, _COLLECTIONS[origin])
    return getattr(origin, "__name__", "") not in ("Tensor", "Module")  # no config can contain these


def _without_marks(hint: Any) -> tuple[Any, Any]:
    """Return the origin of an annotation, such as `list` for `list[int]`, and the annotation without `Annotated`."""
    while get_origin(hint) is Annotated:
        hint = hint.__origin__
    return get_origin(hint) or hint, hint
