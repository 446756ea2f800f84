"""Checks of a run's record before it is used. Creating objects from a config runs code, so not every record is trusted.

Records are signed with a secret key of the user who made them. A record without a valid signature may only name classes
of this project, and others that the current user allows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from runner.config.catalogue import CONF
from runner.config.composed import targets
from runner.config.nearest import Advice
from runner.files.addresses import has_hidden
from runner.files.signing import is_signed
from runner.runs.kept_code import read_code

SIGNED = ("config.yaml", "overrides.yaml")
"""Files of a record that determine what is run; the modules kept with it are signed too."""

_HARMLESS = re.compile(
    r"(runner(\.callbacks|\.algorithms)?|torch\.(nn|optim|optim\.lr_scheduler)|torchmetrics(\.[a-z]+)?)\.[A-Z]\w*"
)
"""Classes that a record may name besides those in `conf/`; not all of torch, since some of it can run files."""

_COMMANDS = ("_cmd",)
"""Suffixes of keys whose values are run as commands."""
_ADDRESSES = ("tracking_uri", "entity")
"""Keys that control where data is sent, with values that may not look like an address."""


def signed_code(modules: Mapping[str, bytes]) -> list[bytes]:
    """Return the parts of the kept modules that are signed, names and contents."""
    return [part for name in sorted(modules) for part in (name.encode(), modules[name])]


def is_own(folder: Path) -> bool:
    """Return whether this user made the record in a folder, and it is unchanged since."""
    if not all((folder / name).is_file() for name in (*SIGNED, "signature")):  # reading a pipe would never end
        return False
    try:
        given = (folder / "signature").read_bytes()
        return is_signed(given, [*((folder / name).read_bytes() for name in SIGNED), *signed_code(read_code(folder))])
    except OSError:
        return False


def check_targets(folder: Path, configs: Sequence[Any], allowed: Sequence[str]) -> None:
    """Check that another user's record names only classes and commands of this project. Nothing is imported.

    `allowed` are names, or patterns with `*`.

    Raises:
        ValueError: the record names something else; the message lists it, and says how to allow it.
    """
    if is_own(folder):
        return
    shipped = {match for file in CONF.rglob("*.yaml") for match in re.findall(r"_target_: *(\S+)", file.read_text())}
    names = {str(section["_target_"]) for config in configs for _, section in targets(config)}
    # Recorded configs are resolved; an interpolation could yield another target when objects are created.
    names |= {one for one in _strings(configs[0]) if "${" in one}
    names |= {str(one) for config in configs for path, one in _leaves(config) if path.endswith(_COMMANDS) and one}
    unknown = sorted(one for one in names - shipped if not _HARMLESS.fullmatch(one) and not _is_allowed(one, allowed))
    if unknown:
        text = (
            f"{folder / 'config.yaml'}: this run was made by someone else, or on another machine, and uses code that "
            f"is not part of this project: {', '.join(unknown)}. It would run with your permissions: read the file, "
            f"and if you trust it, add '{_allowing('allow_targets', unknown)}'"
        )
        raise ValueError(Advice(text).knowing(key="allow_targets"))


def check_addresses(folder: Path, configs: Sequence[Any], allowed: Sequence[str], typed: Sequence[str]) -> None:
    """Check that another user's record sends nothing elsewhere and uses no files outside of its folder.

    `allowed` are addresses and paths, or patterns with `*`. Keys that were typed now replace the recorded values.

    Raises:
        ValueError: the record names such addresses or paths; the message lists them, and says how to allow them.
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
        text = (
            f"{folder / 'config.yaml'}: this run was made by someone else, or on another machine, and would send to, "
            f"read from or write to: {', '.join(unknown)}. If you trust that, add "
            f"'{_allowing('allow_addresses', unknown)}'"
        )
        raise ValueError(Advice(text).knowing(key="allow_addresses"))


def check_credentials(folder: Path, config: Any, typed: Sequence[str]) -> None:
    """Check that no address of a record lacks its credentials, which are removed when a record is written.

    Keys that were typed now replace the recorded values.

    Raises:
        ValueError: an address lacks its credentials; the message names the first such key.
    """
    for path, value in _leaves(config):
        if isinstance(value, str) and has_hidden(value) and not _is_typed(path, typed):
            file = folder / "config.yaml"
            raise ValueError(f"{path}={value!r}: {file} does not contain credentials; type the full address again")


def check_links(folder: Path) -> None:
    """Check that the folder of another user's run holds only files, folders, and links that stay inside it.

    Raises:
        ValueError: the folder holds something else, through which reads and writes could go elsewhere or never end.
    """
    if is_own(folder):
        return
    inside = folder.resolve()
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                reason = f"is a link to {os.readlink(path)!r}, which is outside the run's folder"
            elif not path.is_symlink() and not (path.is_file() or path.is_dir()):
                reason = "is neither a file nor a folder"
            else:
                continue
            raise ValueError(
                f"{path}: {reason}, and this run was made by someone else, or on another machine: remove it"
            )


def _leads_out(path: str, value: Any) -> bool:
    """Return whether a config value is an address, or a path that leaves the folder."""
    if path.rpartition(".")[2] in _ADDRESSES:
        return value is not None
    is_path = isinstance(value, str) and (value.startswith(("/", "~")) or ".." in Path(value).parts)
    return is_path or (isinstance(value, str) and "://" in value)


def _is_typed(path: str, typed: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{one}.") for one in typed)


def _is_allowed(value: Any, allowed: Sequence[str]) -> bool:
    return any(str(value) == one or fnmatchcase(str(value), one) for one in allowed)


def _allowing(key: str, values: Sequence[str]) -> str:
    """Return the override that allows values, quoted where Hydra's grammar requires it."""
    plain = re.compile(r"[\w.*]+")
    return f"{key}=[{','.join(one if plain.fullmatch(one) else json.dumps(one) for one in values)}]"


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
        for one in config:
            yield from _strings(one)
    elif isinstance(config, str):
        yield config
