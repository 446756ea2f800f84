"""Finds the chosen config files that set a key or make a choice, for messages about values that were not typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runner.cli.command_line import config_dir, key_of


def files_with(key: str, overrides: Sequence[str], conf: Path) -> list[str]:
    """Return the chosen config files that set a key; an empty list if the key was typed."""
    if any(f"{key_of(override)}.".startswith(f"{key}.") for override in overrides):  # the key itself, or one inside it
        return []
    return [_shown(file) for file, group in _files(overrides, conf).items() if _sets(file, group, key)]


def files_choosing(choice: str, overrides: Sequence[str], conf: Path) -> list[str]:
    """Return the config files whose defaults make a choice `group/name`; an empty list if it was typed."""
    if choice in _typed_choices(overrides):
        return []
    files = _files(overrides, conf).items()
    return [_shown(file) for file, group in files if choice in _chosen(_content(file).get("defaults") or [], group)]


def check_encoding(overrides: Sequence[str], conf: Path) -> None:
    """Check that the chosen files in a user's own folder can be read."""
    for file in _files(overrides, conf) if config_dir(overrides) is not None else ():
        content = file.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{_shown(file)}: is not UTF-8 ({error.reason}, byte {error.start}); save it as UTF-8"
            ) from None
        if re.match(rb"\xef\xbb\xbf#\s*@package", content):
            raise ValueError(f"{_shown(file)}: begins with a byte-order mark; save it as UTF-8 without one")


def recipes_of(overrides: Sequence[str], conf: Path) -> list[str]:
    """Return the texts of the chosen files with global keys, each before the files that it is based on."""
    texts = (file.read_text(encoding="utf-8") for file, group in _files(overrides, conf).items() if group)
    return [text for text in texts if _is_global(text)]


def _is_global(text: str) -> bool:
    return re.match(r"#\s*@package\s+_global_", text) is not None


def _typed_choices(overrides: Sequence[str]) -> Iterator[str]:
    """Yield possible choices `group/name` in overrides."""
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and not override.startswith("-"):
            yield from (f"{key}/{name}" for name in re.findall(r"[\w/.-]+", value))


def _files(overrides: Sequence[str], conf: Path) -> dict[Path, str]:
    """Return the files of the typed choices and of their defaults, each with its group."""
    folders = [*filter(None, (conf, config_dir(overrides)))]
    files: dict[Path, str] = {}
    waiting = [*_typed_choices(overrides)]
    while waiting:
        choice = waiting.pop(0)
        group = choice.rpartition("/")[0]
        file = next((path for folder in folders if (path := folder / f"{choice}.yaml").is_file()), None)
        if file is not None and file not in files:  # a file may name itself among its defaults
            files[file] = group
            waiting += _chosen(_content(file).get("defaults") or [], group)
    return files


def _chosen(defaults: Sequence[Any], group: str) -> Iterator[str]:
    """Yield the choices in a defaults list; names without a group belong to the group of the file."""
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            yield f"{group}/{entry}" if group else entry
        for key, names in entry.items() if isinstance(entry, Mapping) else ():
            for name in names if isinstance(names, list) else [names]:
                yield f"{key.removeprefix('override').strip().strip('/').partition('@')[0]}/{name}"


def _sets(file: Path, group: str, key: str) -> bool:
    """Return whether a file sets a key; its keys belong to its group, unless the file is global."""
    node: Any = _content(file)
    parts = key.split(".")
    if group and not _is_global(file.read_text(encoding="utf-8")):
        if parts[0] != group:
            return False
        parts = parts[1:]
    for part in parts:
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _content(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
