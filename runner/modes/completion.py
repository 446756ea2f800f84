"""`runner completion bash`: the completion script of a shell, and the candidates it requests.

runner completion bash >> ~/.bashrc
runner completion zsh >> ~/.zshrc
runner completion fish > ~/.config/fish/conf.d/runner.fish
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from runner.cli.catalogue import GROUPS, Choice, Key, choices, chosen_in, default_choices, top_keys
from runner.cli.command_line import LISTS, key_of, typed_value
from runner.cli.nearest import nearest
from runner.cli.rows import MODES
from runner.failures.facts import WrongKey
from runner.files.printable import printable
from runner.records.listing import OUTPUTS, RUNS

SHELLS = Path(__file__).parent / "shells"
LINE = "RUNNER_LINE"
"""The environment variable in which a shell's script passes the line up to the cursor."""
OPTIONS = {
    "--help": "what there is, with examples",
    "--version": "the version",
    "-m": "a sweep: one job for each value",
    "--cfg": "print the composed config: --cfg job",
    "--config-dir": "a folder of config groups of your own",
}
FOLDERS = 20  # runs that are offered

Candidates = Iterable[tuple[str, str]]
"""Words that a shell may complete to, each with a description."""


def show_completion(typed: Mapping[str, str]) -> None:
    """Print the script that completes commands in a shell: bash, zsh or fish. Write it to where the shell reads it.

    The script asks for candidates by running the command again, which takes a tenth of a second.
    """
    shell = typed.get("completion", "")
    if shell == "candidates":
        for word, text in complete(os.environ.get(LINE, "")):
            print(printable(word), printable(text), sep="\t")
        return
    names = {file.suffix[1:]: file for file in SHELLS.iterdir()}
    if shell not in names:
        raise WrongKey("completion", nearest(shell, names), repr(shell))
    print(names[shell].read_text(encoding="utf-8"), end="")


def complete(line: str) -> list[tuple[str, str]]:
    """Return completions of the last word of a command line that ends at the cursor, with descriptions."""
    words = [*_words(line), ""] if line[-1:].isspace() else _words(line)
    start = next((place for place, word in enumerate(words) if Path(word).name == "runner"), None)
    if start is None or start + 1 >= len(words):
        return []
    *arguments, current = words[start + 1 :]
    found = dict(_candidates(arguments, current))
    return sorted((word, text) for word, text in found.items() if word.startswith(current))


def _words(line: str) -> list[str]:
    """Return the words of a line whose last quote may still be open."""
    for closing in ("", "'", '"'):
        try:
            return shlex.split(line + closing)
        except ValueError:
            continue
    return line.split()


def _candidates(arguments: Sequence[str], current: str) -> Candidates:
    known = choices(_own_folder(arguments))
    mode = arguments[0] if arguments else ""
    if mode in MODES and MODES[mode].words is not None:
        return [*_words_of_mode(mode, known), *((f"{mode}.{key}=", "") for key in MODES[mode].keys)]
    if current.startswith("-"):
        return OPTIONS.items()
    key, equals, value = current.partition("=")
    chosen = _chosen(arguments, known)
    if equals:
        return ((f"{key}={one}", text) for one, text in _values(key.lstrip("+~"), value, known, chosen))
    return _names(arguments, current, known, chosen)


def _words_of_mode(mode: str, known: Sequence[Choice]) -> Candidates:
    """Return what may follow the name of a mode that is typed as a word."""
    if mode == "help":
        groups = [*GROUPS.items(), *((one.name, one.says) for one in MODES.values())]
        return [*groups, *((one.name, one.summary) for one in known), *((key.name, key.comment) for key in top_keys())]
    if mode == "list":
        return [*GROUPS.items(), ("modes", "what a command does with mode=NAME")]
    if mode == "completion":
        return [(file.suffix[1:], "") for file in SHELLS.iterdir()]
    return [(folder, "") for folder in _run_folders()] if mode == "compare" else []


def _names(arguments: Sequence[str], current: str, known: Sequence[Choice], chosen: Sequence[Choice]) -> Candidates:
    """Yield modes, groups and keys; of a long key, the part up to its next dot."""
    if not arguments:
        yield from ((mode.name, mode.says) for mode in MODES.values() if mode.words is not None)
    if current.startswith("~"):
        yield from ((f"~{one.group}.{one.name}", one.summary) for one in chosen if one.group in LISTS)
        return
    for group, says in GROUPS.items():
        if any(one.group == group for one in known):
            yield f"{'+' if group in LISTS else ''}{group}=", says
            yield f"{group}=", says
    for key in (*top_keys(), *_keys(chosen)):
        end = key.name.find(".", len(current))
        yield (f"{key.name}=", f"{key.comment} [{key.value}]") if end < 0 else (key.name[: end + 1], "")


def _values(key: str, value: str, known: Sequence[Choice], chosen: Sequence[Choice]) -> Candidates:
    """Return the values that a key may have; for a list, what is typed so far with each possible next name."""
    if key == "mode":
        return [(mode.name, mode.says) for mode in MODES.values()]
    if key in GROUPS:
        start = value[: max(value.rfind(","), value.rfind("[")) + 1]
        taken = start.strip("[").split(",")
        return [(f"{start}{one.name}", one.summary) for one in known if one.group == key and one.name not in taken]
    if key in MODES and MODES[key].words is not None:
        return _words_of_mode(key, known)
    section, _, name = key.partition(".")
    allowed = MODES[section].keys.get(name) if section in MODES else None
    if isinstance(allowed, tuple):
        return [(one, "") for one in allowed]
    if key in ("resume", "rerun", "run"):
        return [("latest", "the run that saved a checkpoint last"), *((folder, "") for folder in _run_folders())]
    found = next((one for one in (*top_keys(), *_keys(chosen)) if one.name == key), None)
    if found is not None and found.value in ("true", "false"):
        return [("true", found.comment), ("false", found.comment)]
    return []


def _chosen(arguments: Sequence[str], known: Sequence[Choice]) -> list[Choice]:
    """Return the choices of a command: the defaults, those of its recipe, and those that are typed."""
    names = default_choices()
    recipe = typed_value(arguments, "experiment")
    for one in known:
        if one.group == "experiment" and one.name == recipe:
            names |= chosen_in(one.text)
    for argument in arguments:
        group = key_of(argument)
        if group in GROUPS and "=" in argument:
            typed = argument.partition("=")[2].strip("[]'\"").split(",")
            names[group] = [*names.get(group, []), *typed] if argument.startswith("+") else typed
    return [one for one in known if one.name in names.get(one.group, ())]


def _keys(chosen: Sequence[Choice]) -> Iterator[Key]:
    """Yield the keys of choices. A recipe has none: it sets keys of other choices."""
    for one in chosen:
        yield from one.keys if one.package else ()


def _own_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `--config-dir` names, None without it."""
    for place, one in enumerate(arguments):
        option, equals, value = one.partition("=")
        if option == "--config-dir":
            return Path(value if equals else "".join(arguments[place + 1 : place + 2]))
    return None


def _run_folders() -> list[str]:
    """Return the folders of the latest runs; only names are read."""
    found = {str(path.parent) for runs in RUNS for path in Path(OUTPUTS).glob(f"{runs}/config.yaml")}
    return sorted(found, reverse=True)[:FOLDERS]
