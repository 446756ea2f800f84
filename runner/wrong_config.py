"""What is wrong with a configuration, in one message: the key as typed, what is allowed, the nearest name."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.command_line import search_path
from runner.signatures import nearest

CONF = Path(__file__).resolve().parent.parent / "conf"

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError, ImportError)
"""What a wrong configuration raises before training; anything else is a fault of the program, and shown as one."""


EXTRAS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=submitit_local": "hydra-submitit-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "optuna, and pip install --no-deps hydra-optuna-sweeper",
}
"""What has to be installed for a choice that Hydra's plugins bring."""


class WrongConfig(Exception):
    """A configuration that cannot be run; its message is all that a user needs to see."""


@contextmanager
def config_errors(event: str = "") -> Iterator[None]:
    """Turn what a wrong configuration raises into a WrongConfig with one message.

    Args:
        event: only what a hook raises at this event; default: all.
    """
    try:
        yield
    except (WrongConfig, BrokenPipeError):
        raise
    except CONFIG_ERRORS as error:
        if event and not any(f" at {event}," in note for note in getattr(error, "__notes__", [])):
            raise
        raise WrongConfig(explain(error, sys.argv[1:], CONF)) from error


def explain(error: Exception, overrides: Sequence[str], conf: Path) -> str:
    """Return one message about an error in a configuration, of at most a few lines.

    Args:
        error: as Hydra, OmegaConf or a constructor raised it.
        overrides: as typed on the command line.
        conf: the folder of config groups.
    """
    text = str(error).strip() or type(error).__name__
    if isinstance(error, HydraException) or text.startswith("Config group override"):
        return _about_composing(error, text, overrides, conf)
    if isinstance(error, OmegaConfBaseException):
        reason = re.sub(r"^\w+ raised while resolving interpolation: (\[Errno \d+\] )?", "", text.splitlines()[0])
        return f"{getattr(error, 'full_key', None) or 'config'}: {reason}"
    if isinstance(error, OSError) and error.filename is not None:
        text = f"cannot use {str(error.filename)!r}: {error.strerror}"
    return _with_place(error, text)


def _about_composing(error: Exception, text: str, overrides: Sequence[str], conf: Path) -> str:
    """Return what is wrong with the choice of groups and overrides."""
    if match := re.match(r"In '.*': Could not find '(.+)/([^/']*)'\s+Available options in '.+':\n((?:\t.*\n?)*)", text):
        extra = EXTRAS.get(f"{match[1]}={match[2]}")
        if extra is not None:
            return f"{match[1]}={match[2]}: needs a package that is not installed; run pip install {extra}"
        return f"{match[1]}={match[2]}: no such choice; {nearest(match[2], match[3].split())}"
    if match := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", text):
        return _unknown_key(match[1], overrides, conf)
    if match := re.match(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"+{match[1]}: is there already; write {match[1]}=... without the +"
    if match := re.match(r"Multiple values for ([\w/]+)", text):
        group = match[1]
        if group in ("callbacks", "algorithms"):
            return f"{group}: given more than once; for several in one list write '+{group}=[a,b]'"
        return f"+{group}: there is one already; write {group}=... without the +"
    if re.match(r"Config group override must be a string or a list", text):
        return _about_empty(overrides, conf)
    if match := re.match(r"Ambiguous value for argument '(([^=]+)=([^']*))'", text):
        return f"{match[1]}: several values; write '{match[2]}=[{match[3]}]' for a list, or add -m to run each"
    if type(error).__name__ == "OverrideParseException":
        typed = getattr(error, "override", None) or text.splitlines()[0]
        return f"{typed}: cannot be read; write key=value, in quotes where there are brackets: '+callbacks=[a,b]'"
    return text.partition("\n\n")[0]


def _about_empty(overrides: Sequence[str], conf: Path) -> str:
    """Return what to write in place of a group's name that is null or a number."""
    for one in overrides:
        name, _, value = one.lstrip("+").partition("=")
        if name and (conf / name).is_dir() and not re.match(r"[\[A-Za-z_]", value.removeprefix("null")):
            files = [path.stem for path in (conf / name).glob("*.yaml")]
            return f"{one}: a group takes the name of a choice; allowed: {', '.join(sorted(files))}"
        if not name:
            return f"{one}: has no key; write key=value"
    return "a group takes the name of a choice, or a list of names"


def _with_place(error: Exception, text: str) -> str:
    """Return a constructor's message with the key as typed, its class, and the line where that is not of this project.

    The key is in the note that `runner.build` added.
    """
    notes = (re.fullmatch(r"in (\S+) \((\S+)\)", note) for note in getattr(error, "__notes__", []))
    for path, target in (note.groups() for note in notes if note is not None):
        name = text.partition("=")[0]
        if path.rpartition(".")[2] == name:
            return f"{path}{text.removeprefix(name)}"
        if path != "trainer":
            text = f"{path}: {text} ({target})"
        break
    if isinstance(error, TypeError):
        frames = traceback.extract_tb(error.__traceback__)
        text += f" [{frames[-1].filename}:{frames[-1].lineno}]" if frames else ""
    return text


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
                return f"{key}: {part!r} is not part of this run; it is added with +{group}={part}"
            where = f"{'.'.join(parts[:depth])} has no key {part!r}" if depth else f"no key {part!r}"
            groups = [path.name for path in conf.iterdir() if path.is_dir()] if depth == 0 else []
            if part in groups:
                return f"{key}: there is no {part} in this run; choose one with {part}=<name>"
            return f"{key}: {where}; {nearest(part, [*node, *(one for one in groups if one not in node)])}"
        node = node[part]
    return f"{key}: is null, there is nothing to remove"


def _compose_without(key: str, overrides: Sequence[str], conf: Path) -> Any:
    """Return the config as it is without the overrides of a key, or the default one where that fails too."""
    # Without options and what they are given, which has no key.
    keyed = [one for one in overrides if not one.startswith("-") and ("=" in one or one.startswith("~"))]
    kept = [one for one in keyed if not re.match(rf"^[+~]*{re.escape(key)}(=|$)", one)]
    for attempt in ([*kept, *search_path(overrides)], search_path(overrides)):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(conf), version_base="1.3"):
                return OmegaConf.to_container(compose("config", overrides=attempt), resolve=False)
        except Exception:
            continue
    return {}
