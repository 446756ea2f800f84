"""Checks a run's record before use, because creating objects from a config runs code.

Records are signed with a secret key of the user who made them. A record without a valid signature may only name classes
of this project, and others that the current user allows.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from runner.cli.catalogue import CONF
from runner.cli.nearest import Advice
from runner.config.composed import targets
from runner.config.signatures import locate
from runner.failures.errors import wrong_argument
from runner.files.addresses import has_hidden
from runner.files.names import CONFIG
from runner.files.values import Kind
from runner.records.arguments import bind, texts
from runner.records.record import Record

HARMLESS = re.compile(
    r"(runner(\.callbacks|\.algorithms)?|torch\.(nn|optim|optim\.lr_scheduler)"
    r"|torchmetrics(\.(aggregation|classification|regression))?)\.[A-Z]\w*"
)
"""Classes, other than those in `conf/`, that a record may name; others in torch and torchmetrics can load files."""


def check_targets(record: Record, configs: Sequence[Any], allowed: Sequence[str]) -> None:
    """Check that another user's record names only classes of this project or `allowed` ones. Nothing is imported.

    `allowed` holds names, or patterns with `*`.
    """
    if record.is_own:
        return
    names = {str(section["_target_"]) for config in configs for _, section in targets(config)}
    # Recorded configs are resolved already; an interpolation could yield another target later.
    names |= {text for text in _strings(configs[0]) if "${" in text}
    shipped = {text for key, text in _shipped() if key == "_target_"}
    _refuse_code(record, {name: name for name in names - shipped if not HARMLESS.fullmatch(name)}, allowed)


def check_arguments(
    record: Record,
    configs: Sequence[Any],
    allowed_targets: Sequence[str],
    allowed_addresses: Sequence[str],
    typed: Sequence[str],
) -> None:
    """Check that another user's record runs no command, sends nothing elsewhere, and uses no files outside its folder.

    The targets have passed `check_targets`, and are imported here: each must be defined where its name says, not merely
    imported there. The parameter that a string is bound to declares its kind. Keys that were typed now replace the
    recorded values.
    """
    if record.is_own:
        return
    shipped = _shipped()
    code: dict[str, str] = {}
    places: set[str] = set()
    for config in (_without(config, typed) for config in configs):
        places |= {text for _, text in _leaves(config) if isinstance(text, str) and _leads_out(text)}
        for path, section in targets(config):
            name = section["_target_"]
            if ("_target_", name) not in shipped and not _is_within(name, home := _home(locate(path, name))):
                code[home] = f"{name}, which is {home}"
        for argument in bind(config):
            for path, text in texts(argument.value, argument.path):
                if argument.kinds is None and not _is_allowed(argument.target, allowed_targets):
                    code[argument.target] = f"{argument.target}, which may use {path}={text!r} in any way"
                kinds = argument.kinds or frozenset()
                if Kind.COMMAND in kinds or (Kind.CODE in kinds and "/" in text):
                    code[text] = text
                elif kinds & {Kind.ADDRESS, Kind.PATH} or (Kind.HUB_NAME in kinds and "/" in text):
                    places.add(text)
    _refuse_code(record, code, allowed_targets)
    places -= {text for _, text in shipped}
    if unknown := sorted(address for address in places if not _is_allowed(address, allowed_addresses)):
        text = (
            f"{record.folder / CONFIG}: this run was made by someone else, or on another machine, and would send to, "
            f"read from or write to: {', '.join(unknown)}. If you trust that, add "
            f"{_allowing('--allow-addresses', unknown)}"
        )
        raise ValueError(Advice(text).with_facts(key="--allow-addresses"))


def _refuse_code(record: Record, code: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Refuse code that is not allowed; `code` maps the name to allow to a description."""
    if unknown := sorted(name for name in code if not _is_allowed(name, allowed)):
        text = (
            f"{record.folder / CONFIG}: this run was made by someone else, or on another machine, and uses code that "
            f"is not part of this project: {'; '.join(code[name] for name in unknown)}. It would run with your "
            f"permissions: read the file, and if you trust it, add {_allowing('--allow-targets', unknown)}"
        )
        raise ValueError(Advice(text).with_facts(key="--allow-targets"))


def _home(target: Any) -> str:
    """Return the dotted name of a class or function at its definition; for any other object, that of its class."""
    owner = target if hasattr(target, "__qualname__") and hasattr(target, "__module__") else type(target)
    return f"{owner.__module__}.{owner.__qualname__}"


def _is_within(name: str, home: str) -> bool:
    """Return whether a name is only a shortcut to a definition within its own package."""
    return home.startswith(f"{name.rpartition('.')[0]}.")


def _shipped() -> set[tuple[str, str]]:
    """Return the strings in the files of `conf/`, each with its key."""
    files = (yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader) for file in CONF.rglob("*.yaml"))
    return {(path.rpartition(".")[2], text) for file in files for path, text in _leaves(file) if isinstance(text, str)}


def check_credentials(record: Record, typed: Sequence[str]) -> None:
    """Check that no value of a record lacks its credentials, which are not written into records.

    Keys that were typed now replace the recorded values.
    """
    for path, value in _leaves(record.config):
        if isinstance(value, str) and has_hidden(value) and not _is_typed(path, typed):
            file = record.folder / CONFIG
            raise wrong_argument(path, value, f"{file} does not contain credentials; type the full value again")


def check_links(record: Record) -> None:
    """Check that the folder of another user's run holds only files, folders, and links that stay inside it."""
    if record.is_own:
        return
    inside = record.folder.resolve()
    for root, folders, files in os.walk(record.folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                reason = f"is a link to {os.readlink(path)!r}, which is outside the run's folder"
            elif not path.is_symlink() and not (path.is_file() or path.is_dir()):
                reason = "is neither a file nor a folder"
            else:
                continue
            raise ValueError(
                f"{path}: {reason}, and this run was made by someone else, or on another machine; no run writes such "
                "files: use a copy of its folder without them"
            )


def _leads_out(text: str) -> bool:
    """Return whether a string is an address, or a path that leaves the folder."""
    return text.startswith(("/", "~")) or ".." in Path(text).parts or "://" in text


def _without(config: Any, typed: Sequence[str], path: str = "") -> Any:
    """Return a config without the keys that were typed."""
    if not isinstance(config, Mapping):
        return config
    inner = {key: f"{path}.{key}" if path else str(key) for key in config}
    return {key: _without(value, typed, inner[key]) for key, value in config.items() if inner[key] not in typed}


def _is_typed(path: str, typed: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{key}.") for key in typed)


def _is_allowed(value: Any, allowed: Sequence[str]) -> bool:
    return any(str(value) == pattern or fnmatchcase(str(value), pattern) for pattern in allowed)


def _allowing(option: str, values: Sequence[str]) -> str:
    """Return the option that allows values, quoted for a shell; `?` replaces characters that would separate values.

    `runner.load` has an argument of the same name, such as `allow_targets`.
    """
    return f"{option} {shlex.quote(','.join(re.sub(r'[][,]', '?', value) for value in values))}"


def _leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values except containers with their dotted paths; the items of a list have the path of the list."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for value in config:
            yield from _leaves(value, path)
    else:
        yield path, config


def _strings(config: Any) -> Iterator[str]:
    if isinstance(config, Mapping):
        config = [*config.keys(), *config.values()]
    if isinstance(config, list):
        for item in config:
            yield from _strings(item)
    elif isinstance(config, str):
        yield config
