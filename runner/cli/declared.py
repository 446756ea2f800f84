"""Finds, without imports, which kind of string a key's parameter takes, such as a path."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from runner.cli.catalogue import Choice, choices, chosen_in, default_choices
from runner.cli.command_line import config_dir, key_of, typed_value
from runner.cli.docstrings import find_definition
from runner.files import values
from runner.files.values import Kind
from runner.terminal.commands import in_quotes

_KINDS = {name: kind for name, hint in vars(values).items() for kind in values.kinds_in(hint)}
"""The kind that each name in `runner.files.values` declares."""
_UNREADABLE = re.compile(r"(\+{0,2}[\w.]+)=([^\[\]{}'\"$]*[^\[\]{}'\",$\w\s./:@%+*?|-][^\[\]{}'\"$]*)", re.ASCII)
"""An override without quotes, brackets or interpolations whose value Hydra's grammar refuses."""
_QUOTED = {Kind.PATH, Kind.INNER_PATH, Kind.ADDRESS, Kind.HUB_NAME, Kind.SECRET}
_HYDRAS = {"hydra.run.dir": Kind.PATH, "hydra.sweep.dir": Kind.PATH, "hydra.sweep.subdir": Kind.INNER_PATH}


def chosen(arguments: Sequence[str], known: Sequence[Choice]) -> list[Choice]:
    """Return the choices of a command: defaults, choices of its recipe, and typed ones."""
    names = default_choices()
    recipe = typed_value(arguments, "experiment")
    for choice in known:
        if choice.group == "experiment" and choice.name == recipe:
            names |= chosen_in(choice.text)
    groups = {choice.group for choice in known}
    for argument in arguments:
        group = key_of(argument)
        if group in groups and "=" in argument:
            typed = argument.partition("=")[2].strip("[]'\"").split(",")
            names[group] = [*names.get(group, []), *typed] if argument.startswith("+") else typed
    return [choice for choice in known if choice.name in names.get(choice.group, ())]


def kinds_at(key: str, arguments: Sequence[str], choices: Sequence[Choice]) -> set[Kind]:
    """Return the kinds of string that a key takes; empty if its parameter is unknown, or takes any text.

    Args:
        key: the full key, such as `data.path`.
        arguments: the arguments of the command, which may change the target of the key's section.
        choices: the choices of the command, see `chosen`.
    """
    if key in _HYDRAS:
        return {_HYDRAS[key]}
    section, _, argument = key.rpartition(".")
    target = typed_value(arguments, f"{section}._target_") or _target_in(section, choices)
    definition = find_definition(target) if section and target else None
    names = re.findall(r"\w+", definition.annotations.get(argument, "")) if definition is not None else ()
    return {_KINDS[name] for name in names if name in _KINDS}


def with_quotes(arguments: Sequence[str]) -> list[str]:
    """Put quotes around paths and addresses that Hydra cannot read without them, such as `data.path=~/x`.

    In a sweep, each path between commas is quoted separately. Elsewhere, values with a comma stay unchanged, because
    they may be lists. A `~` at the start of a path becomes the home directory, as in a shell.
    """
    unreadable = [_UNREADABLE.fullmatch(argument) for argument in arguments]
    if not any(unreadable):
        return list(arguments)
    known = chosen(arguments, choices(config_dir(arguments)))
    quoted = list(arguments)
    is_sweep = not {"-m", "--multirun"}.isdisjoint(arguments)
    for index, match in enumerate(unreadable):
        if match is None or ("," in match[2] and not is_sweep):
            continue
        kinds = kinds_at(key_of(match[1]), arguments, known)
        if kinds & _QUOTED:
            expand = os.path.expanduser if Kind.PATH in kinds else str
            quoted[index] = f"{match[1]}={','.join(in_quotes(expand(part)) for part in match[2].split(','))}"
    return quoted


def _target_in(section: str, choices: Sequence[Choice]) -> str:
    """Return the target of a section in the files of choices, or ''."""
    for choice in choices:
        if choice.package and f"{section}.".startswith(choice.package):
            try:
                node: Any = yaml.load(choice.text, yaml.CSafeLoader)
            except (yaml.YAMLError, RecursionError):
                continue
            for part in filter(None, section[len(choice.package) :].split(".")):
                node = node.get(part) if isinstance(node, Mapping) else None
            if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
                return node["_target_"]
    return ""
