"""Messages for commands that Hydra cannot compose: which group or key is wrong, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf

from runner.config.command_line import LISTS, config_dir, key_of, search_path
from runner.config.composed import about_unknown
from runner.config.foreign import about_foreign, about_foreign_value
from runner.config.signatures import nearest
from runner.modes.table import MODES

EXTRAS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=submitit_local": "hydra-submitit-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "optuna, and pip install --no-deps hydra-optuna-sweeper",
}
"""The packages to install for choices that are provided by Hydra plugins."""


def about_composing(error: Exception, overrides: Sequence[str], conf: Path) -> str:
    """Return a message that says what is wrong with the chosen groups and overrides.

    Args:
        error: the exception that Hydra raised.
        overrides: the overrides as typed on the command line.
        conf: the folder of config groups.
    """
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return _about_choice(group, name, error.options or (), overrides, conf)
    if isinstance(error, OverrideParseException):
        return _about_grammar(error.override or str(error).splitlines()[0], overrides, conf)
    if key := _missing_key(error):
        typed = [one for one in overrides if key_of(one) == key and "=" in one][-1:]
        if typed and (foreign := about_foreign(key, typed[0].partition("=")[2])) is not None:
            return f"{typed[0]}: no such key; {foreign}"
        config, inner = _compose_without(key, overrides, conf), getattr(error.__cause__, "full_key", None)
        if inner is not None and inner.startswith(f"{key}."):  # the override replaces a whole section
            return f"{_about_key(inner, config, conf)}. To replace all of it: ~{key} '+{key}=...'"
        return _about_key(key, config, conf)
    if key := _key_already_there(error):
        return f"+{key}: is there already; write {key}=... without the +"
    if found := _wrong_override_in_file(error):
        return _about_override_in_file(*found, conf)
    if group := _group_chosen_twice(error):
        if group in LISTS:
            return f"{group}: given more than once; for several in one list write '+{group}=[a,b]'"
        if any(one.startswith(f"+{group}=") for one in overrides):
            return f"+{group}: there is one already; write {group}=... without the +"
        return f"{group}: a file chooses a second one; in its defaults write 'override /{group}: ...' instead"
    if is_empty_choice(error):
        return _about_empty(overrides, conf)
    if override := _ambiguous_override(error):
        key, _, value = override.partition("=")
        return f"{override}: several values; write '{key}=[{value}]' for a list, or add -m to run each"
    return str(error).strip().partition("\n\n")[0]


# Hydra 1.3 raises the same class without attributes in all of the following cases; only the message differs.


def _missing_key(error: Exception) -> str | None:
    """Return the typed key that is not in the composed config, or None if Hydra's message is about something else."""
    match = re.match(r"Could not (?:override|delete from config\.) '([^']+)'", str(error).strip())
    return None if match is None else match[1]


def _key_already_there(error: Exception) -> str | None:
    """Return the existing key that was typed with a +, or None if Hydra's message is about something else."""
    match = re.match(r"Could not append to config\. An item is already at '([^']+)'", str(error).strip())
    return None if match is None else match[1]


def _wrong_override_in_file(error: Exception) -> tuple[str, str] | None:
    """Return the file and the group that it overrides in vain, or None if Hydra's message is about something else."""
    match = re.match(r"In '([^']+)': Could not override '([^']+)'", str(error).strip())
    return None if match is None else (match[1], match[2])


def _group_chosen_twice(error: Exception) -> str | None:
    """Return the group of which two files were chosen, or None if Hydra's message is about something else."""
    match = re.match(r"Multiple values for ([\w/]+)", str(error).strip())
    return None if match is None else match[1]


def _ambiguous_override(error: Exception) -> str | None:
    """Return the override with several values outside a sweep, or None if Hydra's message is about something else."""
    match = re.match(r"Ambiguous value for argument '([^=]+=[^']*)'", str(error).strip())
    return None if match is None else match[1]


def is_empty_choice(error: Exception) -> bool:
    """Return whether a group was set to null or a number, for which Hydra 1.3 raises a plain ValueError."""
    return isinstance(error, ValueError) and str(error).startswith("Config group override must be a string or a list")


def about_replaced(overrides: Sequence[str], conf: Path) -> Iterator[str]:
    """Yield a sentence for each typed `callbacks=a` or `algorithms=a` that replaces all defaults of its list.

    There is no sentence if replacing is clearly intended, because the names include `none` or one of the defaults.
    """
    for group in LISTS:
        typed = [one for one in overrides if one.startswith(f"{group}=")]
        names = {name for one in typed for name in re.findall(r"\w+", one.partition("=")[2])}
        if names and names <= {*_choices(overrides, conf)}:  # unknown names are reported as errors
            usual = _usual(group, overrides, conf)
            if usual and names.isdisjoint(usual):
                yield f"{typed[-1]} replaces {', '.join(usual)}; +{typed[-1]} adds to them"


def _usual(group: str, overrides: Sequence[str], conf: Path) -> list[str]:
    """Return the default names in a list; composes a config only if more than config.yaml decides them."""
    if any(one.startswith("-") or key_of(one) in ("experiment", "sweep", "hydra.searchpath") for one in overrides):
        return list(_compose_without(group, overrides, conf).get(group) or {})
    defaults: Any = OmegaConf.to_container(OmegaConf.load(conf / "config.yaml"), resolve=False)
    return next(entry[group] for entry in defaults["defaults"] if isinstance(entry, dict) and group in entry)


def _about_choice(group: str, name: str, listed: Sequence[str], overrides: Sequence[str], conf: Path) -> str:
    """Return a message about a name that is not a choice of its group, but may be one of another group."""
    typed = f"{group}={name}"
    if typed in EXTRAS:
        return f"{typed}: needs a package that is not installed; run pip install {EXTRAS[typed]}"
    choices = _choices(overrides, conf)
    if name in choices and group not in choices[name]:
        return f"{typed}: no such choice; did you mean {_typed(name, choices[name])}?"
    if (foreign := about_foreign(typed)) is not None:
        return f"{typed}: no such choice; {foreign}"
    own = listed or [one for one, groups in choices.items() if group in groups]
    return f"{typed}: no such choice; {nearest(name, own)}"


def _about_grammar(typed: str, overrides: Sequence[str], conf: Path) -> str:
    """Return a message about text that is not an override; a single word may be a choice of some group, or a mode."""
    choices = _choices(overrides, conf) | {mode: ["mode"] for mode in MODES}
    if near := difflib.get_close_matches(typed, choices, n=1, cutoff=0.8):
        return f"{typed}: has no key; did you mean {_typed(near[0], choices[near[0]])}?"
    if foreign := about_foreign_value("trainer.precision", typed) or about_foreign(typed):
        return f"{typed}: has no key; {foreign}"
    return f"{typed}: cannot be read; write key=value, in quotes where there are brackets: '+callbacks=[a,b]'"


def _choices(overrides: Sequence[str], conf: Path) -> dict[str, list[str]]:
    """Return a dict from each choice to the groups that have it, including those in a typed `--config-dir`."""
    choices: dict[str, list[str]] = {}
    for folder in filter(None, (conf, config_dir(overrides))):
        for file in sorted(folder.glob("*/*.yaml")):
            if file.stem not in ("none", "default"):
                choices.setdefault(file.stem, []).append(file.parent.name)
    return choices


def _about_override_in_file(file: str, group: str, conf: Path) -> str:
    """Return a message about a group that a file overrides, which is not among the defaults; `group@package`."""
    name, _, package = group.partition("@")
    if package:
        return f"{file}: must begin with the line '# @package _global_', so that it can override /{name}"
    groups = [path.name for path in conf.iterdir() if path.is_dir()]
    return f"{file}: 'override /{group}' names no group; {nearest(group, [*groups, 'vars'])}"


def _typed(name: str, groups: Sequence[str]) -> str:
    return " or ".join(f"{'+' if group in LISTS else ''}{group}={name}" for group in groups)


def _about_empty(overrides: Sequence[str], conf: Path) -> str:
    """Return a message about a group that was set to null or a number instead of a name."""
    for one in overrides:
        name, _, value = one.lstrip("+").partition("=")
        if name and (conf / name).is_dir() and not re.match(r"[\[A-Za-z_]", value.removeprefix("null")):
            files = [path.stem for path in (conf / name).glob("*.yaml")]
            return f"{one}: a group takes the name of a choice; allowed: {', '.join(sorted(files))}"
        if not name:
            return f"{one}: has no key; write key=value"
    return "a group takes the name of a choice, or a list of names"


def _about_key(key: str, config: Mapping[str, Any], conf: Path) -> str:
    """Return a message about a key that is not in the composed config."""
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if not isinstance(node, Mapping):
            return f"{key}: {above} is a single value, it has no keys"
        if part not in node:
            group = parts[0]
            if depth == 1 and (conf / group / f"{part}.yaml").exists():
                return f"{key}: {part!r} is not part of this run; it is added with +{group}={part}"
            groups = [path.name for path in conf.iterdir() if path.is_dir()] if depth == 0 else []
            if part in groups:
                return f"{key}: there is no {part} in this run; choose one with {part}=<name>"
            if group == "vars":
                return f"{key}: is not among your values; {nearest(part, node)}. Add it with +{key}=..."
            if depth > 1 and not node:
                return f"{key}: {above} is empty; add to it with +{key}=..."
            where = f"{above} has no key {part!r}" if above else f"no key {part!r}"
            deeper = [one for one in _keys(node, above) if one.endswith(f".{'.'.join(parts[depth:])}")]
            if deeper:
                return f"{key}: {where}; did you mean {' or '.join(deeper)}?"
            known = [*node, *(one for one in groups if one not in node)]
            return f"{key}: {where}; {nearest(part, known) if above else about_unknown(key, known)}"
        node = node[part]
    if node is None:
        return f"{key}: is null, there is nothing to remove"
    return f"{key}: is not there beside what else was typed; add it with +{key}=..."


def _keys(section: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the full keys of a section at a path, and of all sections inside it."""
    for key, value in section.items():
        inner = f"{path}.{key}" if path else key
        yield inner
        if isinstance(value, Mapping):
            yield from _keys(value, inner)


def _compose_without(key: str, overrides: Sequence[str], conf: Path) -> dict[str, Any]:
    """Return the config composed without the overrides of a key.

    If that fails, return the config of the chosen groups alone or, if that fails too, the default config.
    """
    # Options and their values are left out; a value has no key.
    keyed = [one for one in overrides if not one.startswith("-") and ("=" in one or one.startswith("~"))]
    kept = [one for one in keyed if not re.match(rf"^[+~]*{re.escape(key)}(=|$)", one)]
    # The second attempt, in case another key is wrong as well.
    chosen = [one for one in kept if (conf / key_of(one)).is_dir() and not one.startswith("~")]
    for attempt in ([*kept, *search_path(overrides)], [*chosen, *search_path(overrides)], search_path(overrides)):
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(conf), version_base="1.3"):
                plain: Any = OmegaConf.to_container(compose("config", overrides=attempt), resolve=False)
                return plain
        except Exception:
            continue
    return {}
