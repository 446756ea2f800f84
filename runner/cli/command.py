"""Parses a command, once and without Hydra: a verb, its words and options, and the overrides for Hydra."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.cli.catalogue import top_keys
from runner.cli.command_line import (
    FLAGS,
    OPTIONS,
    SHORT,
    TAKE_VALUES,
    about_option,
    check_spaces,
    is_word,
    value_of_option,
    without_brackets,
)
from runner.cli.nearest import Advice, nearest
from runner.cli.spelling import DASHES, check_spelling
from runner.cli.verb import Option, Verb
from runner.cli.verbs import VERBS, find_verb
from runner.failures.errors import WrongKey

CONFIG_DIR = "--config-dir"
_NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Command:
    """A typed command.

    Attributes:
        verb: name of the verb.
        words: the words after it, such as the run.
        options: values of all options of the verb, by name with underscores.
        overrides: the arguments for Hydra: `key=value`, then Hydra's own options, such as `-m`.
    """

    verb: str
    words: tuple[str, ...]
    options: Mapping[str, Any]
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, verb: str, *words: str, overrides: Sequence[str] = (), **options: Any) -> Command:
        """Return a command with the given options, and the defaults of all others."""
        return cls(verb, words, find_verb(verb).defaults | options, tuple(overrides))

    @property
    def row(self) -> Verb:
        """The row of its verb in the table of verbs."""
        return VERBS[self.verb]

    @property
    def run(self) -> str | None:
        """The saved run that it uses; None without one, or if its verb has no `uses_run`."""
        return self.words[0] if self.row.uses_run and self.words else None

    @property
    def batch(self) -> str | None:
        """The batch after the run, as in `fork RUN ba1200`; None without one."""
        return self.words[1] if "BATCH" in self.row.words and len(self.words) > 1 else None

    @property
    def arguments(self) -> list[str]:
        """The arguments that make up the command."""
        changed = [option for option in self.row.options if self.options[option.key] != option.default]
        options = [
            f"--{option.name}"
            if option.kind is bool
            else f"--{option.name}={','.join(value) if option.kind is list else value}"
            for option in changed
            for value in [self.options[option.key]]
        ]
        swept = f"+{AT}="  # also a word of the command
        return [self.verb, *self.words, *options, *(text for text in self.overrides if not text.startswith(swept))]


def parse(arguments: Sequence[str]) -> Command:
    """Return the command that was typed.

    Raises:
        ValueError: the verb or an option does not exist, the value of an option is wrong, or words are missing.
    """
    verb, remaining = split_verb([*map(in_full, arguments)])
    check_spelling(verb, remaining)
    if verb.composes:
        check_spaces(remaining)
    options = verb.defaults
    names = {f"--{option.name}": option for option in verb.options}
    words: list[str] = []
    overrides: list[str] = []
    hydra: list[str] = []
    index = 0
    while index < len(remaining):
        argument = remaining[index]
        name, equals, value = argument.partition("=")
        index += 1
        if (option := names.get(name)) is not None:
            if option.kind is not bool and not equals:
                value = _next(remaining, index, option)
                index += 1
            options[option.key] = _parsed(option, value, equals, options[option.key])
        elif verb.words and re.fullmatch(r"-\d+", argument):  # a negative number is a wrong word, not an option
            words.append(argument)
        elif argument.startswith("-") and not verb.composes and name != CONFIG_DIR:
            raise _no_such_option(verb, remaining, index - 1)
        elif name in TAKE_VALUES and not equals:
            hydra += remaining[index - 1 : index + 1]
            index += 1
        elif argument.startswith("-"):
            hydra.append(argument)
        elif not verb.composes or (verb.words and is_word(argument)):
            words.append(argument)
        else:
            overrides.append(argument)
    _check_options(verb, remaining, hydra)
    _check_words(verb, words)
    if verb.uses_run == "fork":
        for batch in words[1].split(","):
            if not batch_of(batch):
                raise WrongKey("BATCH", "must be the number of a batch, such as ba1200", repr(batch))
        if "," in words[1]:  # a sweep over batches, which Hydra needs as a key
            if not _is_sweep(hydra):
                raise WrongKey("BATCH", "takes one batch; add -m to begin a fork at each", repr(words[1]))
            overrides.append(f"+{AT}={words[1]}")
    return Command(verb.name, tuple(words), options, (*overrides, *hydra))


AT = "at"
"""The key with the batch of a fork in a sweep over batches; each job removes it from its config."""
_FLAG_NAMES = {name for pair in FLAGS.items() for name in pair if name}


def in_full(argument: str) -> str:
    """Return an argument with the full name of the Hydra option that it abbreviates, if there is only one."""
    name, equals, value = argument.partition("=")
    meant = [option for option in OPTIONS if len(name) > 3 and option.startswith(name)]
    return f"{meant[0]}{equals}{value}" if len(meant) == 1 else argument


def is_one_of_hydras(argument: str) -> bool:
    """Return whether an argument is an option of Hydra."""
    name = argument.partition("=")[0]
    is_short = not name.startswith("--") and name[1:2] in SHORT
    return name in (*TAKE_VALUES, *_FLAG_NAMES) or is_short


def batch_of(text: str | None) -> int | None:
    """Return the batch from text such as 1200, ba1200 or 1200ba; None for other text."""
    match = re.fullmatch(r"(?:ba)?(\d{1,12})(?:ba)?", text or "")
    return int(match[1]) if match else None


def index_of_verb(arguments: Sequence[str]) -> int:
    """Return the index of the first argument that is neither an option nor an option's value, perhaps a verb."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        index += 2 if arguments[index] in (*TAKE_VALUES, *DASHES) else 1
    return min(index, len(arguments))


def typed_verb(arguments: Sequence[str]) -> Verb | None:
    """Return the typed verb; None if it was left out."""
    index = index_of_verb(arguments)
    return VERBS.get(arguments[index]) if index < len(arguments) else None


def split_verb(arguments: Sequence[str]) -> tuple[Verb, list[str]]:
    """Return the verb and the other arguments."""
    if (verb := typed_verb(arguments)) is None:
        return VERBS["train"], list(arguments)
    index = index_of_verb(arguments)
    return verb, [*arguments[:index], *arguments[index + 1 :]]


def _next(arguments: Sequence[str], index: int, option: Option) -> str:
    if index >= len(arguments) or arguments[index].startswith("--"):
        raise WrongKey(f"--{option.name}", f"needs a value ({option.help})")
    return arguments[index]


def _parsed(option: Option, value: str, equals: str, before: Any) -> Any:
    """Return the typed value of an option; a list is appended to the value `before`."""
    name = f"--{option.name}"
    if option.kind is bool:
        if equals:
            raise WrongKey(name, "takes no value", repr(value))
        return True
    if isinstance(option.kind, tuple):
        if value not in option.kind:
            raise WrongKey(name, nearest(value, option.kind), repr(value))
        return value
    if option.kind is list:
        names = [name for name in without_brackets(value).split(",") if name]
        return (*(() if before == option.default else before), *names)
    try:
        return option.kind(value)
    except ValueError:
        raise WrongKey(name, f"must be {_NUMBERS[option.kind]}", repr(value)) from None


def _check_words(verb: Verb, words: Sequence[str]) -> None:
    if verb.least_words <= len(words) <= verb.most_words:
        return
    synopsis = " ".join(filter(None, ("runner", verb.name, verb.words)))
    fault = f"takes {verb.words or 'no words'}, not {' '.join(words)}" if words else f"needs {verb.words}"
    text = f"{verb.name}: {fault}; write {synopsis}, such as {verb.example}"
    raise ValueError(Advice(text).with_facts(key=verb.first_word))


def _check_options(verb: Verb, arguments: Sequence[str], hydra: Sequence[str]) -> None:
    """Refuse options that neither the verb nor Hydra has, and Hydra's `-m` for a verb that cannot be swept."""
    for index, argument in enumerate(arguments):
        if argument in hydra and argument.startswith("-") and not is_one_of_hydras(argument):
            raise _no_such_option(verb, arguments, index)
    if not verb.can_be_swept and _is_sweep(hydra):
        raise ValueError(Advice(f"-m: {verb.name} takes one experiment at a time; leave out -m").with_facts(key="-m"))


def _is_sweep(hydra: Sequence[str]) -> bool:
    """Return whether Hydra's options ask for a sweep."""
    return bool({"-m", "--multirun"} & {*hydra})


def _no_such_option(verb: Verb, arguments: Sequence[str], index: int) -> ValueError:
    name, _, value = arguments[index].partition("=")
    if name == "--json":
        return WrongKey(name, "takes no value", repr(value))
    own = [f"--{option.name}" for option in verb.options]
    owners = [other.name for other in VERBS.values() if name in (f"--{option.name}" for option in other.options)]
    if is_one_of_hydras(name):
        return WrongKey(name, f"{verb.name} composes no config and takes no such option; leave it out")
    words = [argument for argument in arguments if not argument.startswith("-") and "=" not in argument]
    if verb.name == "train" and words and words[0] not in VERBS and (near := nearest(words[0], VERBS)).meant:
        return ValueError(f"{words[0]}: no such verb; " + near)
    if {*owners} & {*words}:
        return WrongKey(name, f"is an option of {', '.join(owners)}; write it after the verb")
    if owners and name[2:] not in (key.name for key in top_keys()):
        return WrongKey(name, f"is an option of {', '.join(owners)}, not of {verb.name}")
    meant = nearest(name.lstrip("-"), [option.name for option in verb.options]).meant
    if meant or not verb.composes:
        start = f"did you mean --{meant}? Allowed" if meant else "allowed"
        advice = Advice(f"{verb.name} has no such option; {start}: {', '.join(own) or 'none'}")
        return WrongKey(name, advice.with_facts(allowed=tuple(own), meant=f"--{meant}" if meant else ""))
    return ValueError(f"{arguments[index]}: no such option. " + about_option(name, value_of_option(index, arguments)))
