"""Prepares the command line for Hydra."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from runner.cli.foreign import about_foreign
from runner.cli.nearest import Advice
from runner.failures.errors import WrongKey, wrong_argument
from runner.terminal.commands import in_quotes, unquoted

LISTS = ("callbacks", "algorithms")
"""The config groups with any number of choices in a run."""
_CHOICE = re.compile(rf"^(\+?)({'|'.join(LISTS)})=(.*)$")


def merge_repeated(arguments: Sequence[str]) -> list[str]:
    """Return arguments with repeated choices `+callbacks=a +callbacks=b` merged into `+callbacks=[a,b]` for Hydra.

    `callbacks=none +callbacks=a` becomes `callbacks=[a]`, and the same holds for algorithms. Arguments that cannot
    be merged, such as a sweep over choices (`a,b` without brackets), are left as they are. The last of a choice and its
    removal counts: `~callbacks.a +callbacks=a` becomes `+callbacks=a`. `~callbacks` stands for `callbacks=none`.
    """
    merged = _in_order(arguments)
    for group in LISTS:
        matches = [
            (index, match) for index, word in enumerate(merged) if (match := _CHOICE.match(word)) and match[2] == group
        ]
        appended = [_names(match[3]) for _, match in matches if match[1]]
        replaced = [_names(match[3]) for _, match in matches if not match[1]][-1:]
        if len(matches) < 2 or not appended or None in (*appended, *replaced):
            continue
        names = dict.fromkeys(name for names in (*replaced, *appended) for name in names or () if name != "none")
        first, *later = (index for index, _ in matches)
        merged[first] = f"{'' if replaced else '+'}{group}=[{','.join(names)}]"
        merged = [word for index, word in enumerate(merged) if index not in later]
    return merged


def _in_order(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which later choices win over earlier removals; Hydra always applies removals last."""
    kept: list[str] = []
    for word in arguments:
        if word[:1] == "~" and word[1:] in LISTS:
            kept = [other for other in kept if not (match := _CHOICE.match(other)) or match[2] != word[1:]]
            word = f"{word[1:]}=none"
        elif match := _CHOICE.match(word):
            added = {f"~{match[2]}.{name}" for name in _names(match[3]) or ()}
            kept = [other for other in kept if other not in added]
        kept.append(word)
    return kept


def _names(value: str) -> list[str] | None:
    """Return the names in `a` or `[a,b]`, or None for anything else."""
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    names = [name.strip() for name in inner.split(",")]
    if (inner == value and len(names) > 1) or not all(re.fullmatch(r"[\w/@.-]+", name) for name in names):
        return None
    return names


def key_of(override: str) -> str:
    """Return the key of an override, without a leading + or ~."""
    return override.lstrip("+~").partition("=")[0]


def is_word(argument: str) -> bool:
    """Return whether an argument is a word rather than an override; a path or an address may contain a `=`."""
    key, equals, _ = argument.partition("=")
    if not equals or key.startswith(("/", "./", "../", "outputs/")) or "://" in key:
        return not argument.startswith(("~", "+"))
    return os.path.exists(argument)


def only_typed(arguments: Sequence[str], *sections: str) -> str:
    """Return the one of these sections that has a typed key; '' if none or several have one."""
    named = {*sections} & {key_of(argument).partition(".")[0] for argument in arguments}
    return named.pop() if len(named) == 1 else ""


def typed_value(arguments: Sequence[str], key: str) -> str | None:
    """Return the last value typed as `key=value`, or None if it is missing or null."""
    values = [unquoted(word.partition("=")[2]) for word in arguments if key_of(word) == key and "=" in word]
    return values[-1] if values and values[-1] not in ("", "null") else None


FLAGS = {
    "--help": "-h",
    "--hydra-help": None,
    "--version": None,
    "--resolve": None,
    "--run": "-r",
    "--multirun": "-m",
    "--shell-completion": "-sc",
}
WITH_VALUE = {
    "--cfg": "-c",
    "--package": "-p",
    "--info": "-i",
    "--experimental-rerun": None,
    "--config-path": "-cp",
    "--config-name": "-cn",
    "--config-dir": "-cd",
}
TAKE_VALUES = {name for pair in WITH_VALUE.items() for name in pair if name}
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
OPTIONS = (*FLAGS, *WITH_VALUE)
"""Hydra's command-line options; Hydra has no public list of them."""
_VALUES: dict[str, str] = dict.fromkeys(("--cfg", "-c"), "job, hydra or all, the part of the config to print")
SHORT = ("h", "c", "p", "r", "m", "i")
"""Hydra's short options; those for its config begin with c."""


def check_options(arguments: Sequence[str]) -> None:
    """Refuse options that the runner replaces, and Hydra's options without a value, or with a wrong one."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        value = value if equals else "".join(arguments[index + 1 : index + 2])
        if name in ("--config-path", "-cp"):
            raise ValueError(
                f"{argument}: the runner's own conf/ is always read; --config-dir=<folder> adds yours to it"
            )
        if match := re.fullmatch(r"hydra\.(sweeper|launcher|job_logging|hydra_logging)=([\w-]+)", argument):
            fix = f"hydra/{match[1]}={match[2]}"
            raise ValueError(Advice(f"{argument}: is a group, written with a slash: {fix}").with_facts(fix=fix))
        if argument == "hydra/job_logging=disabled":
            fix = "~callbacks.console_summary ~callbacks.progress_bar"
            raise ValueError(f"{argument}: warnings need it; to print nothing else, use {fix}")
        if name in ("--shell-completion", "-sc"):
            raise ValueError(f"{argument}: to set up completion, use the command `runner completion bash`, zsh or fish")
        if name in TAKE_VALUES - {"--info", "-i"} and (not value or value.startswith("-")):
            raise WrongKey(name, f"needs a value: {_VALUES.get(name, '--hydra-help explains it')}")
        if key_of(argument) in FOLDERS and equals and (folder := unquoted(value)) in ("", "null"):
            reason = "must be a folder; without this key, a new one is made in outputs/"
            raise WrongKey(key_of(argument), reason, repr(folder))
        if name in ("--cfg", "-c") and value not in ("job", "hydra", "all"):
            raise WrongKey(name, f"must be {_VALUES[name]}", repr(value))


def without_brackets(text: str) -> str:
    """Return the inside of a list `[a,b]`, and any other text, such as a pattern `x[ab]`, unchanged."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def about_option(name: str, value: str | None) -> Advice:
    """Return advice on what to type instead of an option that does not exist."""
    key = name.lstrip("-").replace("-", "_")
    if (foreign := about_foreign(key, value)) is not None:
        return Advice("Keys are written without dashes; ") + foreign
    near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.8)  # --resume is not a typo for --resolve
    guess = f"Did you mean {near[0]}? " if near else ""
    fix = near[0] if near else f"{key}={value}" if value else ""
    return Advice(f"{guess}Keys are written without dashes: {key}={value or '...'}").with_facts(fix=fix)


def value_of_option(index: int, arguments: Sequence[str]) -> str | None:
    """Return the value of the option at an index, typed as `--lr=0.1` or as `--lr 0.1`."""
    following = arguments[index + 1 : index + 2]
    values = [arguments[index].partition("=")[2], *(item for item in following if not re.search(r"^[-+~]|=", item))]
    return next(filter(None, values), None)


def check_spaces(arguments: Sequence[str]) -> None:
    """Refuse overrides with spaces around their `=`, which a shell splits. An option may end with `=`."""
    for index, argument in enumerate(arguments):
        if argument.startswith("-"):
            continue
        before = arguments[max(index - 1, 0) : index]
        after = arguments[index + 1 : index + 2]
        if argument.startswith("=") and before and "=" not in before[0]:
            key = before[0]
            value = argument[1:] or "".join(after)
        elif argument.endswith("=") and after and re.match(r"[^-+~=]+$", after[0]):
            key = argument[:-1]
            value = after[0]
        else:
            continue
        text = f"{key} = {value}: has spaces around the =; write {key}={value}"
        raise ValueError(Advice(text).with_facts(key=key_of(key), fix=f"{key}={value}"))


def config_dir(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the `--config-dir` option, or None without that option.

    Raises:
        ValueError: there is no such folder.
    """
    typed = _parse(arguments).config_dir
    if typed is None:
        return None
    folder = Path(typed).absolute()
    if not folder.is_dir():
        reason = "this is a file; give its folder" if folder.exists() else "no such folder"
        raise wrong_argument("--config-dir", str(folder), reason)
    return folder


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Separate overrides from Hydra's options and their values. Hydra itself checks the values."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for name, short in FLAGS.items():
        parser.add_argument(*filter(None, (name, short)), action="store_true")
    for name, short in WITH_VALUE.items():
        parser.add_argument(*filter(None, (name, short)), nargs="?" if name == "--info" else None)
    return parser.parse_known_intermixed_args(list(arguments))[0]


def search_path(arguments: Sequence[str]) -> list[str]:
    """Return the override that makes `hydra.compose` search the `--config-dir`; an empty list without one."""
    folder = config_dir(arguments)
    return [] if folder is None else [f"hydra.searchpath=[{in_quotes(f'file://{folder}')}]"]
