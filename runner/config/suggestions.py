"""Writes messages for commands that Hydra cannot compose: the wrong group or key, and what to write instead."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf

from runner.cli.catalogue import GROUPS, choices, default_choices, top_keys
from runner.cli.command_line import LISTS, OPTIONS, config_dir, key_of, search_path
from runner.cli.docstrings import find_definition
from runner.cli.foreign import about_foreign, about_foreign_value
from runner.cli.nearest import Advice, nearest
from runner.cli.verbs import VERBS
from runner.config.composed import about_unknown
from runner.config.composing import initialized

EXTRAS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=submitit_local": "hydra-submitit-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "optuna, and pip install --no-deps hydra-optuna-sweeper",
}
"""The packages to install for choices from Hydra plugins."""


MOST_MEANT = 3  # suggestions per message

# In all of these cases, Hydra raises the same class without attributes; only the start of the message differs.
NO_SUCH_KEY = re.compile(r"Could not (?:override|delete from config\.) '([^']+)'")
KEY_EXISTS = re.compile(r"Could not append to config\. An item is already at '([^']+)'")
NO_SUCH_GROUP = re.compile(r"In '([^']+)': Could not override '([^']+)'")  # the file, and the group
OVERRIDE_FIRST = re.compile(r"In ([^:]+): Override '.*' is defined before")  # a list there fails an assertion
IN_SEARCH_SPACE = re.compile(r"[+~]+hydra\.sweeper\.params\b")
CHOSEN_TWICE = re.compile(r"Multiple values for ([\w/]+)")
LIST_FOR_SECTION = re.compile(r"Error merging override (?!hydra\.)([^=]+)=\[")
SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '([^=]+=[^']*)'")


def about_composing(error: Exception, overrides: Sequence[str], conf: Path) -> str:
    """Return a message about a fault in the chosen groups and overrides."""
    if isinstance(error, MissingConfigException) and "/" in (error.missing_cfg_file or ""):
        missing = str(error.missing_cfg_file)
        typed = [text for text in overrides if "=" in text and f"{key_of(text)}/{text.partition('=')[2]}" == missing]
        if typed and "/" in typed[0].partition("=")[2]:
            group = key_of(typed[0])
            text = f"{typed[0]}: takes the name of a file in conf/{group}/; --config-dir=<folder> adds your own conf/"
            return Advice(text).with_facts(key=group)
        group, _, name = missing.rpartition("/")
        return _as_advice(_about_choice(group, name, error.options or (), overrides)).with_facts(key=group)
    if isinstance(error, MissingConfigException):
        name = f"--config-name={error.missing_cfg_file}"
        text = f"{name}: conf/ has no such file; experiment=<name> chooses a whole run"
        return Advice(text).with_facts(key="--config-name")
    if isinstance(error, OverrideParseException):
        return _about_grammar(error.override, overrides)
    text = str(error).strip()
    if (typed := next(filter(IN_SEARCH_SPACE.match, overrides), None)) and "hydra.sweeper.params" in text:
        remedy = "type another value, as in 'optimizer.lr=interval(0.1,1)', or drop all with hydra.sweeper.params=null"
        return Advice(f"{typed}: a key of a search space cannot be removed; {remedy}").with_facts(key=key_of(typed))
    if match := NO_SUCH_KEY.match(text):
        return _as_advice(_about_missing_key(match[1], error, overrides, conf)).with_facts(key=match[1])
    if match := KEY_EXISTS.match(text):
        typed = [override.lstrip("+") for override in overrides if override.startswith(f"+{match[1]}=")][-1:]
        text = f"+{match[1]}: is already set; write {match[1]}=... without the +"
        return Advice(text).with_facts(key=match[1], fix="".join(typed))
    if match := NO_SUCH_GROUP.match(text):
        return _about_override_in_file(match[1], match[2], conf)
    if match := OVERRIDE_FIRST.match(text):
        return about_override_first(match[1])
    if match := CHOSEN_TWICE.match(text):
        return _about_second_choice(match[1], overrides)
    if is_empty_choice(error):
        return _about_empty(overrides, conf)
    if match := LIST_FOR_SECTION.match(text):
        key = match[1].lstrip("+")
        instead = f"write {key}.<name>=..., or '{key}={{<name>: ...}}'"
        return Advice(f"{match[1]}=[...]: a list cannot replace a section of keys; {instead}").with_facts(key=key)
    if match := SEVERAL_VALUES.match(text):
        key, _, value = match[1].partition("=")
        takes_one = (conf / key).is_dir() and key not in LISTS
        listed = "" if takes_one else f"write '{key}=[{value}]' for a list, or "
        fix = f"{key}=[{value}]" if key in LISTS else ""
        return Advice(f"{match[1]}: several values; {listed}add -m to run each").with_facts(key=key, fix=fix)
    return text.partition("\n\n")[0]


def _as_advice(text: str) -> Advice:
    return text if isinstance(text, Advice) else Advice(text)


def is_empty_choice(error: Exception) -> bool:
    """Return whether a group was set to null or a number, for which Hydra raises a plain ValueError."""
    return isinstance(error, ValueError) and str(error).startswith("Config group override must be a string or a list")


def about_replaced(overrides: Sequence[str], conf: Path) -> Iterator[str]:
    """Yield a sentence for each typed `callbacks=a` or `algorithms=a` that replaces all defaults of its list.

    If the names include `none` or one of the defaults, the user clearly means to replace, and gets no sentence.
    """
    for group in LISTS:
        typed = [override for override in overrides if override.startswith(f"{group}=")]
        names = {name for override in typed for name in re.findall(r"\w+", override.partition("=")[2])}
        if names and names <= {*_groups_by_choice(overrides)}:  # unknown names are reported as errors
            usual = _usual(group, overrides, conf)
            if usual and names.isdisjoint(usual):
                yield f"{typed[-1]} replaces {', '.join(usual)}; +{typed[-1]} adds to them"


def _usual(group: str, overrides: Sequence[str], conf: Path) -> list[str]:
    """Return the default names in a list; compose a config only if more than config.yaml determines them."""
    options = [word for word in overrides if word.startswith("-") and word not in ("-m", "--multirun")]
    if options or {"experiment", "sweep", "hydra.searchpath"} & {*map(key_of, overrides)}:
        return list(_compose_without(group, overrides, conf).get(group) or {})
    return default_choices()[group]


def _about_choice(group: str, name: str, listed: Sequence[str], overrides: Sequence[str]) -> str:
    """Return a message about a name that is not a choice of its group, but may be one of another group."""
    typed = f"{group}={name}"
    if typed in EXTRAS:
        return f"{typed}: needs a package that is not installed; run pip install {EXTRAS[typed]}"
    groups = _groups_by_choice(overrides)
    own = tuple(listed or [name for name, having in groups.items() if group in having])
    if (foreign := about_foreign(typed)) is not None:
        return (Advice(f"{typed}: no such choice; ") + foreign).with_facts(allowed=own)
    if name in groups and group not in groups[name]:
        return (Advice(f"{typed}: no such choice; ") + _meant(name, groups[name])).with_facts(allowed=own)
    return f"{typed}: no such choice; " + nearest(name, own)


def _about_grammar(typed: str, overrides: Sequence[str]) -> str:
    """Return a message about text that is not an override; a single word may be a choice of some group, or a verb."""
    if not typed:
        return "'': an argument is empty; a shell variable may be unset"
    if typed.endswith((".yaml", ".yml")) and "=" not in typed:
        name = Path(typed).stem
        text = f"{typed}: a file is chosen by its group; put it into conf/experiment/ and write experiment={name}"
        return Advice(text).with_facts(fix=f"experiment={name}")
    if f"--{typed}" in OPTIONS:
        return Advice(f"{typed}: has no key; did you mean --{typed}?").with_facts(fix=f"--{typed}")
    is_key = "." in typed and all(part.isidentifier() for part in typed.split("."))
    if is_key or typed in {*GROUPS, *(key.name for key in top_keys())}:
        return Advice(f"{typed}: has no value; write {typed}=..., without spaces").with_facts(key=typed)
    if typed in VERBS:
        fix = shlex.join(["runner", typed, *(override for override in overrides if override != typed)])
        return Advice(f"{typed}: a verb comes first; write {fix}").with_facts(fix=fix)
    groups = _groups_by_choice(overrides)
    if verbs := difflib.get_close_matches(typed, VERBS, n=1, cutoff=0.75):
        text = f"{typed}: no such verb; did you mean runner {verbs[0]}?"
        return Advice(text).with_facts(fix=verbs[0], allowed=tuple(VERBS))
    if near := difflib.get_close_matches(typed, groups, n=1, cutoff=0.8):
        return f"{typed}: has no key; " + _meant(near[0], groups[near[0]])
    if foreign := about_foreign_value("trainer.precision", typed) or about_foreign(typed):
        return f"{typed}: no such word; " + foreign
    key, equals, value = typed.partition("=")
    if equals and re.search(r"^,|,,|,$", value):
        text = f"{typed}: a value is missing next to a comma"
        return Advice(text).with_facts(key=key_of(key), fix=f"{key}={re.sub(',+', ',', value).strip(',')}")
    if equals and re.match(r"[^\[{\s'\"][^'\"]*$", value):
        fix = f'{key}="{value}"'
        text = f"{typed}: the value cannot be parsed; write it with two pairs of quotes: '{fix}'"
        return Advice(text).with_facts(key=key_of(key), fix=fix)
    if typed.isidentifier():
        text = f"{typed}: neither key=value nor a verb; runner help lists the verbs"
        return Advice(text).with_facts(allowed=tuple(VERBS))
    text = f"{typed}: cannot be read; write key=value, in quotes if it has brackets: '+callbacks=[a,b]'"
    return Advice(text).with_facts(key=key_of(key) if equals else "")


def _groups_by_choice(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return a dict from each choice to the groups that have it, including those in a typed `--config-dir`."""
    groups: dict[str, list[str]] = {}
    for choice in choices(config_dir(overrides)):
        if choice.name not in ("none", "default"):
            groups.setdefault(choice.name, []).append(choice.group)
    return groups


def _about_missing_key(key: str, error: Exception, overrides: Sequence[str], conf: Path) -> str:
    """Return a message about a typed key that is not in the composed config."""
    typed = [override for override in overrides if key_of(override) == key and "=" in override][-1:]
    if typed and (foreign := about_foreign(key, typed[0].partition("=")[2])) is not None:
        return f"{typed[0]}: no such key; " + foreign
    config = _compose_without(key, overrides, conf)
    inner = getattr(error.__cause__, "full_key", None)
    if inner is not None and inner.startswith(f"{key}."):  # the override replaces a whole section
        return f"{_about_key(inner, config, conf)}. To replace all of it: ~{key} '+{key}=...'"
    about = _as_advice(_about_key(key, config, conf))
    return about if typed else about.with_facts(fix="")  # a key to remove has no replacement


def _about_second_choice(group: str, overrides: Sequence[str]) -> str:
    """Return a message about a group for which two files were chosen."""
    if group in LISTS:
        text = f"{group}: given more than once; for several in one list write '+{group}=[a,b]'"
        return Advice(text).with_facts(key=group)
    if any(override.startswith(f"+{group}=") for override in overrides):
        typed = next(override.lstrip("+") for override in overrides if override.startswith(f"+{group}="))
        return Advice(f"+{group}: there is one already; write {group}=... without the +").with_facts(
            key=group, fix=typed
        )
    text = f"{group}: a file chooses a second one; in its defaults write 'override /{group}: ...' instead"
    return Advice(text).with_facts(key=group)


def _about_override_in_file(file: str, group: str, conf: Path) -> str:
    """Return a message about a `group@package` that a file overrides although it is not among the defaults."""
    name, _, package = group.partition("@")
    if package:
        return f"{file}: must begin with the line '# @package _global_', so that it can override /{name}"
    groups = [path.name for path in conf.iterdir() if path.is_dir()]
    return f"{file}: 'override /{group}' names no group; " + nearest(group, [*groups, "vars"])


def about_override_first(file: str) -> str:
    """Return a message about a file whose defaults do not end with their overrides."""
    return f"{file}: its defaults contain an override before another entry; put overrides last"


def _meant(name: str, groups: Sequence[str]) -> Advice:
    """Return advice that asks whether a choice of some groups was meant."""
    typed = [f"{'+' if group in LISTS else ''}{group}={name}" for group in groups]
    fix, key = (typed[0], groups[0]) if len(typed) == 1 else ("", "")
    return Advice(f"did you mean {' or '.join(typed)}?").with_facts(fix=fix, key=key)


def _about_empty(overrides: Sequence[str], conf: Path) -> str:
    """Return a message about a group that was set to null or a number instead of a name."""
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        if name and (conf / name).is_dir() and not re.match(r"[\[A-Za-z_]", value.removeprefix("null")):
            files = [path.stem for path in (conf / name).glob("*.yaml")]
            text = f"{override}: a group takes the name of a choice; allowed: {', '.join(sorted(files))}"
            return Advice(text).with_facts(key=name, allowed=tuple(sorted(files)))
        if not name:
            return f"{override}: has no key; write key=value"
    return "a group takes the name of a choice, or a list of names"


def _about_key(key: str, config: Mapping[str, Any], conf: Path) -> str:
    """Return a message about a key that is not in the composed config."""
    node: Any = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if node is None and depth:
            return f"{key}: {above} is null in this run; runner help {above} shows what sets it"
        if not isinstance(node, Mapping):
            return f"{key}: {above} is a single value and has no keys"
        if part not in node:
            group = parts[0]
            if depth == 1 and (advice := _about_absent(group, part, conf)):
                return f"{key}: " + advice
            groups = [path.name for path in conf.iterdir() if path.is_dir()] if depth == 0 else []
            if part in groups:
                return f"{key}: there is no {part} in this run; choose one with {part}=<name>"
            if group == "vars":
                return f"{key}: is not among your values; " + nearest(part, node) + f". Add it with +{key}=..."
            if depth > 1 and not node:
                return f"{key}: {above} is empty; add to it with +{key}=..."
            where = f"{above} has no key {part!r}" if above else f"no key {part!r}"
            around = {} if group in LISTS and depth > 1 else config  # other hooks have keys of the same names
            if meant := _elsewhere(parts[depth:], node, above) or _elsewhere(parts[depth:], around):
                text = f"{key}: {where}; did you mean {' or '.join(meant)}?"
                return Advice(text).with_facts(meant=meant[0] if len(meant) == 1 else "")
            if depth == len(parts) - 1 and _takes(node.get("_target_"), part):
                reason = f"{node['_target_']} takes it, but nothing in this run sets it; add it with +{key}=..."
                return Advice(f"{key}: {reason}").with_facts(meant=f"+{key}")
            known = [*node, *(group for group in groups if group not in node)]
            return f"{key}: {where}; " + (nearest(part, known) if above else about_unknown(key, known))
        node = node[part]
    if node is None:
        return f"{key}: is already null; there is nothing to remove"
    return f"{key}: is not in this run; add it with +{key}=..."


def _takes(target: Any, name: str) -> bool:
    """Return whether a class or function declares a parameter, according to its source."""
    definition = find_definition(target) if isinstance(target, str) else None
    return definition is not None and name in definition.annotations


def _about_absent(group: str, name: str, conf: Path) -> Advice | None:
    """Return advice on a callback or algorithm that is not in a run; None if its name is unknown."""
    files = [path.stem for path in (conf / group).glob("*.yaml") if path.stem != "none"]
    if name in files:
        text = f"{name!r} is not part of this run; add it with +{group}={name}"
        return Advice(text).with_facts(fix=f"+{group}={name}")
    if group not in LISTS:
        return None
    if (foreign := about_foreign(f"{group}={name}")) is not None:
        return Advice(f"there is no {name!r}; ") + foreign
    if not (near := difflib.get_close_matches(name, files, n=1)):
        return None
    text = f"there is no {name!r}; did you mean {near[0]!r}? Add it with +{group}={near[0]}"
    return Advice(text).with_facts(fix=f"+{group}={near[0]}")


def _elsewhere(parts: Sequence[str], section: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the keys in a section that share the longest ending with a missing key, if there are only a few."""
    known = [key for key in _keys(section, path) if not key.startswith("vars.")]
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        matches = [key for key in known if f".{key}".endswith(f".{end}")]
        if 0 < len(matches) <= MOST_MEANT:
            return matches
    return []


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
    # Leave out options and their values, which have no '='.
    keyed = [word for word in overrides if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    kept = [override for override in keyed if not re.match(rf"^[+~]*{re.escape(key)}(=|$)", override)]
    # The second attempt, in case another key is wrong as well.
    chosen = [override for override in kept if (conf / key_of(override)).is_dir() and not override.startswith("~")]
    for attempt in ([*kept, *search_path(overrides)], [*chosen, *search_path(overrides)], search_path(overrides)):
        try:
            with initialized(conf):
                plain: Any = OmegaConf.to_container(compose("config", overrides=attempt), resolve=False)
                return plain
        except Exception:
            continue
    return {}
