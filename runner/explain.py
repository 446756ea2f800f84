"""What is wrong with a configuration, in one message: the key as typed, what is allowed, the nearest name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.build import nearest

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, OSError, ImportError)
"""What a wrong configuration raises before training; anything else is a fault of the program, and shown as one."""


class WrongConfig(Exception):
    """A configuration that cannot be run; its message is all that a user needs to see."""


def explain(error: Exception, overrides: Sequence[str], conf: Path) -> str:
    """Return one message about an error in a configuration, of at most a few lines.

    Args:
        error: as Hydra, OmegaConf or a constructor raised it.
        overrides: as typed on the command line.
        conf: the folder of config groups.
    """
    text = str(error).strip() or type(error).__name__
    if match := re.match(r"In '.*': Could not find '(.+)/([^/']+)'\s+Available options in '.+':\n((?:\t.*\n?)*)", text):
        return f"{match[1]}={match[2]}: no such choice; {nearest(match[2], match[3].split())}"
    if match := re.match(r"Could not override '([^']+)'", text):
        return _unknown_key(match[1], overrides, conf)
    if match := re.match(r"Could not delete from config\. '([^']+)' does not exist", text):
        return _unknown_key(match[1], overrides, conf)
    if match := re.match(r"Multiple values for (\w+)", text):
        return f"{match[1]}: given more than once; for several in one list write '+{match[1]}=[a,b]'"
    if match := re.match(r"Config group override must be a string or a list\. Got (\w+)", text):
        return f"{_suspect(overrides)}: a config group takes a name or a list of names; to empty one write =none"
    if type(error).__name__ == "OverrideParseException":
        first = text.splitlines()
        return (
            f"{' '.join(first[:2])}. Write key=value; quote values with brackets, commas or blanks: '+callbacks=[a,b]'"
        )
    if isinstance(error, OmegaConfBaseException):
        return f"{getattr(error, 'full_key', None) or 'config'}: {text.splitlines()[0]}"
    notes = "; ".join(note for note in getattr(error, "__notes__", []) if note.startswith("in "))
    return f"{text} ({notes})" if notes else text


def _unknown_key(key: str, overrides: Sequence[str], conf: Path) -> str:
    """Return what to write in place of a key that the composed config does not have."""
    node: Any = _compose_without(key, overrides, conf)
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, Mapping):
            return f"{key}: {'.'.join(parts[:depth])} is a single value, it has no keys"
        if part not in node:
            group = parts[0]
            if depth == 1 and (conf / group / f"{part}.yaml").exists():
                return f"{key}: {part!r} is not part of this run; add it with +{group}={part}"
            where = f"{'.'.join(parts[:depth])} has no key {part!r}" if depth else f"no key {part!r}"
            groups = [path.name for path in conf.iterdir() if path.is_dir()] if depth == 0 else []
            return f"{key}: {where}; {nearest(part, [*node, *(one for one in groups if one not in node)])}"
        node = node[part]
    return f"{key}: cannot be overridden here"


def _compose_without(key: str, overrides: Sequence[str], conf: Path) -> Any:
    """Return the config as it is without the overrides of a key, or the default one where that fails too."""
    kept = [one for one in overrides if not re.match(rf"^[+~]*{re.escape(key)}(=|$)", one) and not one.startswith("-")]
    for attempt in (kept, []):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(conf), version_base="1.3"):
                return OmegaConf.to_container(compose("config", overrides=attempt), resolve=False)
        except Exception:
            continue
    return {}


def _suspect(overrides: Sequence[str]) -> str:
    for one in overrides:
        name, _, value = one.partition("=")
        if value in ("null", "", "None") or value.replace(".", "").isdigit() or not name:
            return one
    return "a config group"
