"""`runner completion bash`: prints the script that completes commands in bash, zsh or fish.

    runner completion bash >> ~/.bashrc
    runner completion zsh >> ~/.zshrc
    runner completion fish > ~/.config/fish/conf.d/runner.fish

The script asks for candidates by running the command again, which takes a tenth of a second.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from runner.cli.catalogue import GROUPS, Choice, Key, choices, top_keys
from runner.cli.command import Command, index_of_verb, split_verb
from runner.cli.command_line import LISTS, TAKE_VALUES, is_word
from runner.cli.declared import chosen, kinds_at
from runner.cli.nearest import nearest
from runner.cli.verb import Verb
from runner.cli.verbs import VERBS
from runner.failures.errors import WrongKey
from runner.files.names import CONFIG
from runner.files.printable import printable
from runner.files.values import Kind
from runner.records.listing import OUTPUTS, RUNS

SHELLS = Path(__file__).parent / "shells"
LINE = "RUNNER_LINE"
"""The environment variable in which a shell's script passes the line up to the cursor."""
OPTIONS = {
    "--help": "an overview, with examples",
    "--version": "the version",
    "-m": "a sweep: one job for each value",
    "--cfg": "print the composed config: --cfg job",
    "--config-dir": "a folder of config groups of your own",
    "--json": "one JSON object for programs",
}
FOLDERS = 20  # runs to offer

Candidates = Iterable[tuple[str, str]]
"""Words that a shell may complete to, each with a description."""


def run(command: Command) -> None:
    """Print the script of a shell, or the candidates that such a script asks for."""
    (shell,) = command.words
    if shell == "candidates":
        for word, text in complete(os.environ.get(LINE, "")):
            print(printable(word), printable(text), sep="\t")
        return
    names = {file.suffix[1:]: file for file in SHELLS.iterdir()}
    if shell not in names:
        raise WrongKey("SHELL", nearest(shell, names), repr(shell))
    print(names[shell].read_text(encoding="utf-8"), end="")


def complete(line: str) -> list[tuple[str, str]]:
    """Return completions, with descriptions, for the last word of a command line that ends at the cursor."""
    words = [*_words(line), ""] if line[-1:].isspace() else _words(line)
    start = next((number for number, word in enumerate(words) if Path(word).name == "runner"), None)
    if start is None or start + 1 >= len(words):
        return []
    *arguments, current = words[start + 1 :]
    candidates = dict(_candidates(arguments, current))
    return sorted((word, text) for word, text in candidates.items() if word.startswith(current))


def _words(line: str) -> list[str]:
    """Return the words of a line; its last quote may still be open."""
    for closing in ("", "'", '"'):
        try:
            return shlex.split(line + closing)
        except ValueError:
            continue
    return line.split()


def _candidates(arguments: Sequence[str], current: str) -> Candidates:
    known = choices(_own_folder(arguments))
    verb, remaining = split_verb(arguments)
    previous = arguments[-1] if arguments else ""
    if previous in TAKE_VALUES:
        return []  # the shell offers files
    key, equals, value = current.partition("=")
    for option in verb.options:
        values = option.kind if isinstance(option.kind, tuple) else ()
        if previous == f"--{option.name}" and option.kind is not bool:
            return [(value, "") for value in values]
        if equals and key == f"--{option.name}":
            return [(f"{key}={value}", "") for value in values]
    if current.startswith("-"):
        own = {f"--{option.name}": option.help for option in verb.options}
        always = ("--help", "--json", "--config-dir")
        general = {name: text for name, text in OPTIONS.items() if name in always or _takes(verb, name)}
        return (own | general).items()
    of_run = chosen(arguments, known)
    if equals:
        return ((f"{key}={name}", text) for name, text in _values(key.lstrip("+~"), value, arguments, known, of_run))
    verbs = [(row.name, row.help) for row in VERBS.values()] if index_of_verb(arguments) == len(arguments) else []
    words = [*_words_of(verb, remaining, known)]
    return words if not verb.composes else [*verbs, *words, *_names(current, known, of_run)]


def _takes(verb: Verb, option: str) -> bool:
    """Return whether a verb takes an option that is not its own."""
    return verb.can_be_swept if option == "-m" else verb.composes


def _words_of(verb: Verb, typed: Sequence[str], known: Sequence[Choice]) -> Candidates:
    """Return candidates for the next word after a verb."""
    if verb.name == "help":
        groups = [*GROUPS.items(), *((row.name, row.help) for row in VERBS.values())]
        return [*groups, *((row.name, row.summary) for row in known), *((key.name, key.comment) for key in top_keys())]
    if verb.name == "list":
        return [*GROUPS.items(), ("verbs", "the possible first words of a command")]
    if verb.name == "completion":
        return [(file.suffix[1:], "") for file in SHELLS.iterdir()]
    with_value = [f"--{option.name}" for option in verb.options if option.kind is not bool]
    values = [index + 1 for index, word in enumerate(typed) if word in (*with_value, *TAKE_VALUES)]
    count = sum(not word.startswith("-") and is_word(word) for index, word in enumerate(typed) if index not in values)
    names = verb.words.split()
    word = names[min(count, len(names) - 1)] if names and (count < len(names) or "..." in names[-1]) else ""
    if word.strip("[].") != "RUN":
        return []
    latest = [("latest", "the run that saved a checkpoint last")]
    return [*latest, *((folder, "") for folder in _run_folders())]


def _names(current: str, known: Sequence[Choice], of_run: Sequence[Choice]) -> Candidates:
    """Yield groups and keys; a long key only up to its next dot."""
    if current.startswith("~"):
        yield from ((f"~{choice.group}.{choice.name}", choice.summary) for choice in of_run if choice.group in LISTS)
        return
    for group, purpose in GROUPS.items():
        if any(choice.group == group for choice in known):
            yield f"{'+' if group in LISTS else ''}{group}=", purpose
            yield f"{group}=", purpose
    for key in (*top_keys(), *_keys(of_run)):
        end = key.name.find(".", len(current))
        yield (f"{key.name}=", f"{key.comment} [{key.value}]") if end < 0 else (key.name[: end + 1], "")


def _values(
    key: str, value: str, arguments: Sequence[str], known: Sequence[Choice], of_run: Sequence[Choice]
) -> Candidates:
    """Return possible values of a key; for a list, the typed part followed by each possible next name."""
    if key in GROUPS:
        start = value[: max(value.rfind(","), value.rfind("[")) + 1]
        taken = start.strip("[").split(",")
        return [(f"{start}{row.name}", row.summary) for row in known if row.group == key and row.name not in taken]
    declared = next((item for item in (*top_keys(), *_keys(of_run)) if item.name == key), None)
    if declared is not None and declared.value in ("true", "false"):
        return [("true", declared.comment), ("false", declared.comment)]
    return _files(value) if {Kind.PATH, Kind.HUB_NAME} & kinds_at(key, arguments, of_run) else []


def _files(start: str) -> Candidates:
    """Return the files in the folder of a path, except those that need quotes; folders end with a slash."""
    folder = start.rpartition("/")[0]
    root = Path(f"{folder}/" if "/" in start else ".").expanduser()
    with suppress(OSError):
        inside = sorted(root.iterdir(), key=lambda path: path.name)
        is_hidden = start.rpartition("/")[2].startswith(".")
        plain = [path for path in inside if re.fullmatch(r"[\w.@%+-]+", path.name)]
        shown = [path for path in plain if is_hidden or not path.name.startswith(".")]
        before = f"{folder}/" if "/" in start else ""
        return [(f"{before}{path.name}{'/' * path.is_dir()}", "") for path in shown]
    return []


def _keys(of_run: Sequence[Choice]) -> Iterator[Key]:
    """Yield the keys of choices. A recipe has no keys of its own: it sets those of other choices."""
    for choice in of_run:
        yield from choice.keys if choice.package else ()


def _own_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `--config-dir` names, or None."""
    for index, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option == "--config-dir":
            return Path(value if equals else "".join(arguments[index + 1 : index + 2]))
    return None


def _run_folders() -> list[str]:
    """Return the folders of the latest runs; only names are read."""
    folders = {str(path.parent) for runs in RUNS for path in Path(OUTPUTS).glob(f"{runs}/{CONFIG}")}
    return sorted(folders, reverse=True)[:FOLDERS]
