"""The settings that `runner decide` compares, read from its command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from hydra.core.override_parser.types import Override

from runner.cli.command import Command
from runner.cli.command_line import LISTS, key_of, merge_repeated
from runner.cli.declared import with_quotes
from runner.failures.errors import WrongKey
from runner.records.record import Record
from runner.records.result import SEED, Result

VERB = "decide"
SWEEPER = "decide"
"""The choice of `hydra/sweeper`, which users need not type."""
EXAMPLE = "optimizer.lr=0.1,0.2, or settings in quotes: 'optimizer=sgd optimizer.lr=0.1' optimizer=adamw"


@dataclass(frozen=True)
class Contender:
    """A setting to compare.

    Attributes:
        overrides: the overrides that only this setting has; may be empty.
        folder: the folder of runs that was typed for it; empty if none was.
        results: the results of these runs, by seed; they count as if they had been trained for the decision.
    """

    overrides: tuple[str, ...]
    folder: str = ""
    results: Mapping[int, Result] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Its folder, or its overrides as text."""
        return self.folder or " ".join(self.overrides) or "as it is"

    def job(self, seed: int) -> list[str]:
        """Return the overrides of its job with a seed."""
        return [*self.overrides, f"{SEED}={seed}"]


def as_sweep(command: Command) -> Command:
    """Return a command whose settings are its words, and whose overrides make it a sweep; other verbs are unchanged.

    A setting is an argument in quotes with several overrides, or an override of a key that other settings have too.
    Values separated by commas stay overrides.
    """
    if command.verb != VERB:
        return command
    if any(key_of(override) == SEED for override in command.overrides):
        raise WrongKey(SEED, "decide trains one seed after another, from 0; leave it out")
    keys = Counter(
        key_of(part) for override in command.overrides if not _is_addition(override) for part in _parts(override)
    )
    settings = [
        override
        for override in command.overrides
        if not _is_addition(override) and (len(_parts(override)) > 1 or keys[key_of(override)] > 1)
    ]
    shared = [override for override in command.overrides if override not in settings]
    single = {key_of(override) for override in settings}
    if len(single) > 1 and all(len(_parts(override)) == 1 for override in settings):
        raise ValueError(f"{' and '.join(sorted(single))}: each typed more than once; put each setting in quotes")
    for word in filter(str.strip, command.words):
        if not Path(word).is_dir():
            raise WrongKey("SETTING", f"must be a folder of runs, or overrides, such as {EXAMPLE}", repr(word))
    words = [*command.words, *settings]
    if len(words) == 1:
        raise WrongKey("SETTING", "is the only one; decide compares at least two; '' is the experiment as it is")
    return replace(command, words=tuple(words), overrides=(f"hydra/sweeper={SWEEPER}", *shared, "--multirun"))


def find_contenders(command: Command, typed: Sequence[Override]) -> list[Contender]:
    """Return the settings to compare; the others are compared with the first.

    Args:
        command: the command as `as_sweep` returns it.
        typed: the overrides that all settings share, or that list values.

    Raises:
        WrongKey: there are fewer than two settings, or two are equal, or one repeats a key that all share.
    """
    swept = [override for override in typed if override.is_sweep_override()]
    if any(override.get_key_element().lstrip("+") == SEED for override in typed):
        raise WrongKey(SEED, "decide trains one seed after another, from 0; leave out sweep=seeds and seed")
    for override in swept:
        if not override.is_discrete_sweep():
            raise WrongKey(override.get_key_element(), "decide compares a list of values, such as 0.1,0.2")
    values = product(*([f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in swept))
    if swept and any(Path(word).is_dir() for word in command.words if word):
        raise WrongKey(swept[0].get_key_element(), "lists values, and settings are typed as folders; do only one")
    shared = [str(override.input_line) for override in typed if not override.is_sweep_override()]
    settings = [_find_setting(word, shared) for word in command.words] or [Contender(())]
    contenders = [
        replace(setting, overrides=(*setting.overrides, *combination))
        for setting, combination in product(settings, values)
    ]
    if len(contenders) < 2:
        raise WrongKey("SETTING", f"there is nothing to compare; list values, as in {EXAMPLE}")
    if len({*contenders}) < len(contenders):
        twice = next(contender for contender in contenders if contenders.count(contender) > 1)
        raise WrongKey("SETTING", "is given twice", repr(twice.name))
    fixed = {key_of(override.get_key_element()) for override in typed}
    for key in (key_of(override) for setting in settings for override in setting.overrides):
        if key in fixed or key == SEED:
            raise WrongKey(key, "is typed for one setting and for all; type it in each setting, or for all")
    return contenders


def _find_setting(word: str, shared: Sequence[str]) -> Contender:
    """Return the setting of a word: a folder of finished runs that differ only in the seed, or a list of overrides."""
    if not word or not Path(word).is_dir():
        return Contender((*with_quotes(merge_repeated(shlex.split(word))),))
    from runner.comparing.candidates import find_candidate  # imports numpy, which takes a tenth of a second

    runs = find_candidate(word, "SETTING").runs
    if foreign := [run.folder for run in runs if not Record(run.folder).is_own]:
        raise WrongKey("SETTING", f"{foreign[0]} was made by someone else; type its settings", repr(word))
    own = {tuple(text for text in run.result.overrides if key_of(text) != SEED and text not in shared) for run in runs}
    if len(own) != 1:
        reason = "must hold finished runs of one setting, which differ only in the seed"
        raise WrongKey("SETTING", reason, repr(word))
    return Contender(own.pop(), word, {seed: run.result for run in runs if (seed := run.config.get(SEED)) is not None})


def _is_addition(override: str) -> bool:
    """Return whether an override adds a callback or an algorithm, and may be typed more than once; or is an option."""
    return override.startswith("-") or any(override.startswith(f"+{group}=") for group in LISTS)


def _parts(argument: str) -> list[str]:
    """Return the overrides in an argument, such as 'optimizer=sgd optimizer.lr=0.1'; usually it is one."""
    try:
        parts = shlex.split(argument)
    except ValueError:
        return [argument]
    return parts if len(parts) > 1 and all("=" in part or part.startswith("~") for part in parts) else [argument]
