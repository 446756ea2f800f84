"""What to type instead of a command as it is spelled elsewhere: keys that are verbs, words and options here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from runner.cli.command_line import key_of
from runner.cli.nearest import Advice
from runner.cli.verbs import VERBS
from runner.terminal.commands import unquoted

_NAMES_RUN = {"resume": "resume", "rerun": "rerun", "run": "replay"}
"""Keys whose value is a run, and the verb that takes it if no other was typed."""
_OPTIONS = {
    "resume_allow": "--allow-changes",
    "allow_targets": "--allow-targets",
    "allow_addresses": "--allow-addresses",
    "revive": "--revive",
}
_FLAGS = {"output": ("json", "--json"), "allow_code": ("true", "--allow-code"), "skip_finished": ("false", "--afresh")}
"""Keys that are options without a value, and the value of the key that they stand for."""
_DASHES = ("--resume", "--rerun", "--mode")


def check_spelling(arguments: Sequence[str]) -> None:
    """Refuse keys that are verbs, words or options of the command line, with the command to type instead.

    Raises:
        ValueError: there is such a key.
    """
    typed = _keyed(arguments)
    wrong = [argument for argument, key in typed if _is_other_spelling(key)]
    if not wrong:
        return
    fix = _translated(typed)
    text = f"{' '.join(wrong)}: a command begins with a verb; write {fix}"
    raise ValueError(Advice(text).knowing(key=key_of(wrong[0]).lstrip("-"), fix=fix))


def _keyed(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return each argument with its key; an option such as `--resume RUN` is one argument, `resume=RUN`."""
    found = []
    skip = False
    for place, argument in enumerate(arguments):
        if skip:
            skip = False
            continue
        name = argument.partition("=")[0]
        if name in _DASHES:
            skip = argument == name and place + 1 < len(arguments)
            value = argument.partition("=")[2] or (arguments[place + 1] if skip else "")
            argument = f"{name[2:]}={value}"
        found.append((argument, key_of(argument) if "=" in argument and not argument.startswith("-") else ""))
    return found


def _is_other_spelling(key: str) -> bool:
    section, _, name = key.partition(".")
    verb = VERBS.get(section.replace("_", "-"))
    is_of_verb = verb is not None and (name in verb.defaults or (not name and bool(verb.words) and not verb.uses_run))
    return key in ("mode", "at", *_NAMES_RUN, *_OPTIONS, *_FLAGS) or is_of_verb or key in ("replay.batch",)


def _translated(typed: Sequence[tuple[str, str]]) -> str:
    """Return the command in the language of verbs."""
    values = {key: unquoted(argument.partition("=")[2]) for argument, key in typed if key}
    named = [key for key in _NAMES_RUN if values.get(key, "null") not in ("", "null")]
    kept = [argument for argument, key in typed if not (key and _is_other_spelling(key))]
    own = [key.partition(".")[0].replace("_", "-") for _, key in typed if _is_other_spelling(key)]
    asked = values.get("mode", "").replace("_", "-")
    verb = asked if asked in VERBS and asked != "train" else ""
    verb = verb or next((name for name in (*kept[:1], *own) if name in VERBS and name not in _NAMES_RUN), "")
    kept = [argument for argument in kept if argument != verb]
    if "at" in values and values["at"] not in ("", "null"):
        verb = "fork"
    verb = verb or next((_NAMES_RUN[key] for key in named), "")
    words = [values[key] for key in named[:1]] + _words_of(verb, values)
    return " ".join(["runner", *filter(None, [verb]), *map(shlex.quote, [*words, *_options_of(typed), *kept])])


def _words_of(verb: str, values: Mapping[str, str]) -> list[str]:
    """Return the words that are values of keys: the moment of a fork, the batch of a replay, or the verb's own key."""
    keys = {"fork": "at", "replay": "replay.batch"}
    value = values.get(keys.get(verb, verb.replace("-", "_")), "")
    if verb in _NAMES_RUN or not value:
        return []
    return value[1:-1].split(",") if value.startswith("[") else [value]


def _options_of(typed: Sequence[tuple[str, str]]) -> list[str]:
    found = []
    for argument, key in typed:
        value = unquoted(argument.partition("=")[2])
        section, _, name = key.partition(".")
        verb = VERBS.get(section.replace("_", "-"))
        if key in _FLAGS:
            found += [_FLAGS[key][1]] * (value.lower() == _FLAGS[key][0])
        elif key in _OPTIONS:
            found += [_OPTIONS[key], value.strip("[]")]
        elif verb is not None and name in verb.defaults:
            flag = f"--{name.replace('_', '-')}"
            is_flag = isinstance(verb.defaults[name], bool)
            found += [flag] * (not is_flag or value.lower() == "true") + [value.strip("[]")] * (not is_flag)
    return found
