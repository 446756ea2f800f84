"""Corrects commands that use keys, as other tools do, instead of this project's verbs, words and options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runner.cli.catalogue import top_keys
from runner.cli.command_line import TAKE_VALUES, is_word, key_of, value_of_option, without_brackets
from runner.cli.foreign import about_foreign
from runner.cli.nearest import Advice, nearest
from runner.cli.verb import Verb
from runner.cli.verbs import VERBS
from runner.terminal.commands import unquoted

_NAMES_RUN = {"resume": "resume", "rerun": "rerun", "run": "replay"}
"""Keys whose value is a run, with the verb that takes it if the user typed no other."""
_WORDS = {"fork": "at", "replay": "replay.batch", "runs": "runs.where", "table": "table.where"}
"""Verbs whose words are the value of a key with another name."""
_OPTIONS = {
    "resume_allow": "--allow-changes",
    "allow_targets": "--allow-targets",
    "allow_addresses": "--allow-addresses",
    "revive": "--revive",
}
_FLAGS = {"output": ("json", "--json"), "allow_code": ("true", "--allow-code"), "skip_finished": ("false", "--afresh")}
"""Keys that correspond to options without a value, with the key's value that the option means."""
DASHES = ("--resume", "--rerun", "--mode")
"""Options of other tools that are verbs here, or take a verb."""


class _Argument(NamedTuple):
    """A word, an override, or an option with its value."""

    parts: tuple[str, ...]
    key: str = ""
    value: str = ""

    @property
    def is_word(self) -> bool:
        return not self.key and len(self.parts) == 1 and not self.parts[0].startswith(("-", "+", "~"))


def check_spelling(verb: Verb, arguments: Sequence[str]) -> None:
    """Refuse keys that are verbs, words or options on this command line, and show the command to type instead.

    `arguments` are all but the verb.

    Raises:
        ValueError: an argument has such a key.
    """
    typed = _parts(verb, arguments)
    name = _verb_of(verb, [argument for argument in typed if _is_other_spelling(argument.key)])
    meant = VERBS[name or "train"]
    own = {argument.key for argument in typed if argument.key in meant.defaults and meant.composes}
    own -= {key.name for key in top_keys()} if own else set()  # such as `seed`, a key of experiments too
    wrong = [argument for argument in typed if argument.key in own or _is_other_spelling(argument.key)]
    if not wrong:
        return
    shown = " ".join(part for argument in wrong for part in argument.parts)
    kept = [part for argument in typed if argument not in wrong and not argument.is_word for part in argument.parts]
    values = {argument.key: argument.value for argument in wrong if argument.value not in ("", "null")}
    runs = dict.fromkeys(values[key] for key in _NAMES_RUN if key in values)
    if len(runs) > 1:
        raise ValueError(Advice(f"{shown}: a command uses one run; give only one").with_facts(key=wrong[0].key))
    words = [*runs]
    words += [*(part.parts[0] for part in typed if part.is_word and part.parts[0] != name), *_words_of(name, values)]
    missing = meant.words.split()[len(words) : meant.least_words]
    arguments = [*words, *missing, *_options_of(meant, wrong), *kept]
    fix = " ".join(["runner", *filter(None, [name]), *map(shlex.quote, arguments)])
    why = "no such key" if name in (verb.name, "") else "a command begins with a verb"
    advice = Advice(f"{shown}: {why}; write {fix}")
    raise ValueError(advice.with_facts(key=wrong[0].key, fix="" if missing else fix))


def _parts(verb: Verb, arguments: Sequence[str]) -> list[_Argument]:
    """Return the arguments, each option together with its value; `--resume RUN` counts as the key `resume`."""
    take_values = {*TAKE_VALUES, *(f"--{option.name}" for option in verb.options if option.kind is not bool)}
    parts = []
    index = 0
    while index < len(arguments):
        name, equals, value = arguments[index].partition("=")
        length = 1
        is_key = bool(equals) and not name.startswith("-") and not is_word(arguments[index])
        is_condition = not verb.composes and key_of(name).partition(".")[0] not in (verb.name, "output")
        key = key_of(name) if is_key and not is_condition else ""
        if name in DASHES:
            key = name[2:]
            value = value_of_option(index, arguments) or ""
            length = 1 if equals or not value else 2
            value = value or ("" if key == "mode" else "latest")
        elif name in take_values and not equals:
            length = 2
        parts.append(_Argument(tuple(arguments[index : index + length]), key, unquoted(value) if key else ""))
        index += length
    return parts


def _is_other_spelling(key: str) -> bool:
    """Return whether a key is a verb, a word or an option with the name of its verb."""
    section, _, name = key.partition(".")
    verb = VERBS.get(section.replace("_", "-"))
    is_of_verb = verb is not None and (name in verb.defaults or (not name and bool(verb.words) and not verb.uses_run))
    return is_of_verb or key in ("mode", *_NAMES_RUN, *_WORDS.values(), *_OPTIONS, *_FLAGS)


def _verb_of(typed: Verb, wrong: Sequence[_Argument]) -> str:
    """Return the intended verb; '' for `train`, which may be left out."""
    values = {argument.key: argument.value for argument in wrong if argument.value not in ("", "null")}
    sections = [argument.key.partition(".")[0].replace("_", "-") for argument in wrong]
    verb = "" if typed.name == "train" else typed.name
    if "at" in values:
        return "fork"
    if mode := values.get("mode", "").replace("_", "-"):
        if mode not in VERBS:
            mode = _known_verb(values["mode"])
        return "" if mode == "train" else mode
    verb = verb or next((section for section in sections if section in VERBS and section not in _NAMES_RUN), "")
    return verb or next((name for key, name in _NAMES_RUN.items() if key in values), "")


def _known_verb(mode: str) -> str:
    """Return the verb that an unknown value of `mode` means."""
    near = nearest(mode, VERBS)
    foreign = about_foreign(f"mode={mode}")
    if foreign is not None or not near.meant or "," in mode:
        raise ValueError((Advice(f"mode={mode}: no such verb; ") + (foreign or near)).with_facts(key="mode"))
    return near.meant


def _words_of(verb: str, values: Mapping[str, str]) -> list[str]:
    """Return the words given as values of keys: the batch of a fork or replay, or the verb's own key."""
    value = values.get(_WORDS.get(verb, verb.replace("-", "_")), "")
    if verb in _NAMES_RUN or not value:
        return []
    return [unquoted(item.strip()) for item in value[1:-1].split(",")] if value.startswith("[") else [value]


def _options_of(verb: Verb, wrong: Sequence[_Argument]) -> list[str]:
    options = []
    for argument in wrong:
        key, value = argument.key, argument.value
        section, _, name = key.rpartition(".")
        defaults = (VERBS.get(section.replace("_", "-")) or verb).defaults
        if key in _FLAGS:
            options += [_FLAGS[key][1]] * (value.lower() == _FLAGS[key][0])
        elif key in _OPTIONS:
            options += [_OPTIONS[key], without_brackets(value)]
        elif name in defaults and value != "null":
            flag = f"--{name.replace('_', '-')}"
            is_flag = isinstance(defaults[name], bool)
            options += [flag] * (not is_flag or value.lower() == "true") + [without_brackets(value)] * (not is_flag)
    return options
