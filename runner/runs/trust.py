"""Whether a run's record may be used: making objects of a config runs code, so somebody else's may not name any class.

Records are signed with a secret of the user who made them. One without a valid signature may name what ships with this
project, and what its reader allows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runner.addresses import has_hidden
from runner.config.composed import targets
from runner.config.errors import CONF
from runner.files.signing import is_signed
from runner.runs.kept_code import read_code

SIGNED = ("config.yaml", "overrides.yaml")
"""Files of a record that say what is run; the modules that are kept with it are signed too."""

_HARMLESS = re.compile(
    r"(runner|callbacks|algorithms|torch\.(nn|optim|optim\.lr_scheduler)|torchmetrics(\.[a-z]+)?)\.[A-Z]\w*"
)
"""Classes that a record may name besides those that stand in `conf/`; not all of torch, which can also run files."""

_COMMANDS = ("_cmd",)
"""Ends of keys whose values are run."""
_ADDRESSES = ("tracking_uri", "entity")
"""Keys that say where data goes in words that may look like no address."""


def signed_code(modules: Mapping[str, bytes]) -> list[bytes]:
    """Return the parts of the kept modules that are signed: names and contents."""
    return [part for name in sorted(modules) for part in (name.encode(), modules[name])]


def is_own(folder: Path) -> bool:
    """Whether this user made the record in a folder, and nobody has changed it since."""
    if not all((folder / name).is_file() for name in (*SIGNED, "signature")):  # a pipe would never end
        return False
    try:
        given = (folder / "signature").read_bytes()
        return is_signed(given, [*((folder / name).read_bytes() for name in SIGNED), *signed_code(read_code(folder))])
    except OSError:
        return False


def check_targets(folder: Path, configs: Sequence[Any], allowed: Sequence[str]) -> None:
    """Raise where a record that this user did not make names what is not of this project. Nothing is imported.

    Args:
        folder: of the record.
        configs: all that will be made of it, in plain containers.
        allowed: names, as far as `*` goes patterns, that the user allows.

    Raises:
        ValueError: all that is not allowed, and how to allow it.
    """
    if is_own(folder):
        return
    shipped = {match for file in CONF.rglob("*.yaml") for match in re.findall(r"_target_: *(\S+)", file.read_text())}
    names = {str(section["_target_"]) for config in configs for _, section in targets(config)}
    # An interpolation is resolved when objects are made, and could bring a target of its own; a record has none.
    names |= {one for one in _strings(configs[0]) if "${" in one}
    names |= {str(one) for config in configs for path, one in _leaves(config) if path.endswith(_COMMANDS) and one}
    unknown = sorted(one for one in names - shipped if not _HARMLESS.fullmatch(one) and not _is_allowed(one, allowed))
    if unknown:
        raise ValueError(
            f"{folder / 'config.yaml'}: this run was made by someone else, or on another machine, and uses what is not "
            f"of this project: {', '.join(unknown)}. That would run with your rights: read the file, and if you trust "
            f"it, add '{_allowing('allow_targets', unknown)}'"
        )


def check_addresses(folder: Path, configs: Sequence[Any], allowed: Sequence[str], typed: Sequence[str]) -> None:
    """Raise where a record that this user did not make says where data goes, or where files lie, outside of its folder.

    Args:
        folder: of the record.
        configs: all that will be made of it, in plain containers.
        allowed: addresses and paths, as far as `*` goes patterns, that the user allows.
        typed: keys that were typed now, in place of what the record says.

    Raises:
        ValueError: all that is not allowed, in full, and how to allow it.
    """
    if is_own(folder):
        return
    shipped = {match for file in CONF.rglob("*.yaml") for match in re.findall(r": *(\S+://\S+)", file.read_text())}
    unknown = sorted(
        {
            f"{value}"
            for config in configs
            for path, value in _leaves(config)
            if _leads_out(path, value)
            and value not in shipped
            and not _is_typed(path, typed)
            and not _is_allowed(value, allowed)
        }
    )
    if unknown:
        raise ValueError(
            f"{folder / 'config.yaml'}: this run was made by someone else, or on another machine, and would send to, "
            f"read from or write to: {', '.join(unknown)}. If you trust that, add "
            f"'{_allowing('allow_addresses', unknown)}'"
        )


def check_credentials(folder: Path, config: Any, typed: Sequence[str]) -> None:
    """Raise where a record has an address without the credentials that it had.

    Args:
        folder: of the record.
        config: its own.
        typed: keys that were typed now, in place of what the record says.

    Raises:
        ValueError: the first such key, and what to do.
    """
    for path, value in _leaves(config):
        if isinstance(value, str) and has_hidden(value) and not _is_typed(path, typed):
            file = folder / "config.yaml"
            raise ValueError(f"{path}={value!r}: {file} holds no credentials; type the whole address again")


def check_links(folder: Path) -> None:
    """Raise where the folder of a run that this user did not make holds anything but files, folders and links inside.

    Raises:
        ValueError: writing to it could write elsewhere, and reading it read elsewhere, or never end.
    """
    if is_own(folder):
        return
    inside = folder.resolve()
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                reason = f"is a link to {os.readlink(path)!r}, which is not in the run's folder"
            elif not path.is_symlink() and not (path.is_file() or path.is_dir()):
                reason = "is neither a file nor a folder"
            else:
                continue
            raise ValueError(
                f"{path}: {reason}, and this run was made by someone else, or on another machine: remove it"
            )


def _leads_out(path: str, value: Any) -> bool:
    """Whether a value of a config is an address or a path that does not stay in a folder."""
    if path.rpartition(".")[2] in _ADDRESSES:
        return value is not None
    is_path = isinstance(value, str) and (value.startswith(("/", "~")) or ".." in Path(value).parts)
    return is_path or (isinstance(value, str) and "://" in value)


def _is_typed(path: str, typed: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{one}.") for one in typed)


def _is_allowed(value: Any, allowed: Sequence[str]) -> bool:
    return any(str(value) == one or fnmatchcase(str(value), one) for one in allowed)


def _allowing(key: str, values: Sequence[str]) -> str:
    """Return the override that allows values, quoted where Hydra's grammar wants it."""
    plain = re.compile(r"[\w.*]+")
    return f"{key}=[{','.join(one if plain.fullmatch(one) else json.dumps(one) for one in values)}]"


def _leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values that are no containers, with their dotted paths; those of a list have the list's."""
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
        for one in config:
            yield from _strings(one)
    elif isinstance(config, str):
        yield config
