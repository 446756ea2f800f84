"""The catalog of config groups, their choices, and the keys of each, read directly from the files of `conf/`.

Nothing is composed, and neither Hydra nor torch is imported. A choice is described by the comment at the top of its
file, and a key by the comment beside it. The `conf/` of the working directory is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from runner.cli.command_line import LISTS
from runner.files.whole import read_bounded

CONF = (Path(__file__).resolve().parents[1] / "conf").resolve()
LARGEST = 1_000_000  # bytes of a file to read
OWN = "conf"  # in the working directory: the user's own choices

GROUPS = {
    "model": "the network, with its loss and metrics",
    "data": "training and evaluation data",
    "optimizer": "the optimizer, and its learning rate",
    "optimizer/param_groups": "different settings for some of the parameters",
    "scheduler": "how the learning rate changes during training",
    "trainer": "length, precision, microbatches, device",
    "launch": "processes on this machine",
    "callbacks": "what watches training; any number of them",
    "algorithms": "what changes training; any number of them",
    "experiment": "recipes, which set keys anywhere",
    "sweep": "sweeps, with -m",
    "vars": "values of your own, for other keys to use",
}
"""The config groups and their purposes."""


class Key(NamedTuple):
    """A key of a config file."""

    name: str
    """The full key, as users type it."""
    value: str
    """Its value as written in the file."""
    comment: str


@dataclass(frozen=True)
class Choice:
    """A file of a config group, such as 'optimizer/param_groups', in the runner's folder or the user's."""

    group: str
    name: str
    file: Path
    is_own: bool

    @property
    def typed(self) -> str:
        """The override that chooses it."""
        return f"{'+' if self.group in LISTS and self.name != 'none' else ''}{self.group}={self.name}"

    @property
    def package(self) -> str:
        """The prefix of its keys, ending with a dot; empty for files that set keys anywhere."""
        return "" if self.group in ("experiment", "sweep") else f"{self.group.replace('/', '.')}."

    @cached_property
    def text(self) -> str:
        """The content of its file; empty if it cannot be read."""
        try:
            return read_bounded(self.file, LARGEST).decode()
        except (OSError, ValueError):
            return ""

    @property
    def comment(self) -> str:
        """The comment at the top of its file, without commands and hardware."""
        lines = [line for line in self._top if not line.startswith(("@package", "python -m runner"))]
        return re.sub(r"^Hardware: .*?(\(mean[^)]*\)|unknown)\. ?", "", " ".join(lines))

    @property
    def summary(self) -> str:
        """The first sentence of the comment, without its period."""
        return re.split(r"(?<!\.)\. (?=[A-Z]|$)|; |: (?=python )", f"{self.comment} ")[0].rstrip(". ")

    @property
    def command(self) -> str:
        """The example command in its comment, or ''."""
        return next((line for line in self._top if line.startswith("python -m runner")), "")

    @property
    def _top(self) -> list[str]:
        lines = re.match(r"(?:#.*\n)*", f"{self.text}\n")
        return [line.lstrip("# ") for line in (lines[0] if lines else "").splitlines()]

    @cached_property
    def keys(self) -> list[Key]:
        """Its keys; empty if its file cannot be read."""
        return keys_of(self.text, self.package)

    @property
    def target(self) -> str:
        """The class or function that its first section names, or ''."""
        match = re.search(r"^\s*_target_: *([\w.]+)", self.text, re.MULTILINE)
        return match[1] if match else ""


def choices(own: Path | None = None) -> list[Choice]:
    """Return the choices of all groups: first the runner's, then the user's in `own` (None: in `conf/`, if any)."""
    listed: list[Choice] = []
    for folder in (CONF, own or Path(OWN)):
        for group in GROUPS if folder.is_dir() else ():
            files = sorted((folder / group).glob("*.yaml"))
            known = {choice.name for choice in listed if choice.group == group}
            is_own = folder is not CONF and folder.resolve() != CONF
            listed += [Choice(group, file.stem, file, is_own) for file in files if file.stem not in known]
    return sorted(listed, key=lambda choice: [*GROUPS].index(choice.group))


def keys_of(text: str, package: str = "") -> list[Key]:
    """Return the keys of a config file that have values; an empty list if it cannot be read."""
    try:
        root = yaml.compose(text, yaml.CSafeLoader)
        return [*_walk(root, package, text.splitlines(), set())]
    except (yaml.YAMLError, RecursionError):
        return []


def top_keys() -> list[Key]:
    """Return the keys of the main config, except Hydra's."""
    keys = keys_of((CONF / "config.yaml").read_text(encoding="utf-8"))
    return [key for key in keys if not key.name.startswith("hydra.")]


def default_choices() -> dict[str, list[str]]:
    """Return the choices of the main config, by group."""
    return chosen_in((CONF / "config.yaml").read_text(encoding="utf-8"))


def chosen_in(text: str) -> dict[str, list[str]]:
    """Return the choices in the `defaults` of a config file, by group; an empty dict if it cannot be read."""
    try:
        content: Any = yaml.load(text, yaml.CSafeLoader)
    except (yaml.YAMLError, RecursionError):
        return {}
    chosen: dict[str, list[str]] = {}
    entries = content.get("defaults") if isinstance(content, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        for key, names in entry.items() if isinstance(entry, Mapping) else ():
            group = str(key).rpartition(" ")[2].lstrip("/")
            chosen[group] = [str(name) for name in (names if isinstance(names, list) else [names]) if name is not None]
    return chosen


def _walk(node: Any, prefix: str, lines: list[str], seen: set[int]) -> Iterator[Key]:
    """Yield the keys in a node; a section that several keys share through an alias counts only once."""
    seen.add(id(node))
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        name = f"{prefix}{key.value}"
        if key.value in ("_target_", "_partial_", "defaults"):
            continue
        if isinstance(value, yaml.MappingNode) and value.value and id(value) not in seen:
            yield from _walk(value, f"{name}.", lines, seen)
        else:
            yield Key(name, _as_written(value, lines), _comment(key, value, lines))


def _as_written(value: Any, lines: list[str]) -> str:
    """Return a value as written in the file, on one line."""
    first = value.start_mark
    last = value.end_mark
    if first.line == last.line:
        return lines[first.line][first.column : last.column]
    text = [lines[first.line][first.column :], *lines[first.line + 1 : last.line], lines[last.line][: last.column]]
    return " ".join(re.sub(r"\s#.*", "", line).strip() for line in text).strip()


def _comment(key: Any, value: Any, lines: list[str]) -> str:
    """Return the comment above a key and the one beside its value, or beside the key.

    Comment lines above a key are indented as the key is. A comment beside it goes on in lines that are indented deeper.
    """
    column, first, last = key.start_mark.column, key.start_mark.line, value.end_mark.line
    ends = {last: lines[last][value.end_mark.column :] if last < len(lines) else ""}
    ends.setdefault(first, lines[first])
    beside = ""
    for line, text in ends.items():
        if match := re.search(r"(?:^|\s)#\s*(.*)", text):
            beside = " ".join([match[1], *_comments(lines[line + 1 :], rf"\s{{{column + 1},}}#")])
            break
    above = _comments(lines[:first][::-1], rf"\s{{{column}}}#")[::-1]
    if len(above) == first:  # at the top of the file, which it describes
        above = [] if beside else above[-1:]
    return "; ".join(filter(None, [" ".join(above), beside]))


def _comments(lines: list[str], start: str) -> list[str]:
    """Return the texts of the comments with which lines begin."""
    return [line.lstrip("# ") for line in takewhile(re.compile(start).match, lines)]
