"""`runner list callbacks`: lists the choices of a config group with a line about each. Composes no config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from runner.cli.catalogue import GROUPS, Choice, choices
from runner.cli.command import Command
from runner.cli.command_line import LISTS, config_dir
from runner.cli.docstrings import Definition, classes_in
from runner.cli.nearest import nearest
from runner.cli.verbs import VERBS
from runner.failures.errors import WrongKey
from runner.terminal.answer import set_fields
from runner.terminal.text import heading, in_columns

SHIPPED = Path(__file__).parents[1]
"""The folder of the `callbacks` and `algorithms` that come with the runner."""


def run(command: Command) -> None:
    """Print a line about each choice of a config group, or of all groups; `runner list verbs` prints the verbs."""
    known = choices(config_dir(command.overrides))
    only = "".join(command.words).replace(".", "/")
    if only == "verbs":
        set_fields(result={"verbs": {verb.name: verb.help for verb in VERBS.values()}})
        print("\n".join(in_columns([(verb.name, verb.help) for verb in VERBS.values()], indent=0)))
        return
    if only and only not in GROUPS:
        raise WrongKey("GROUP", nearest(only, [*GROUPS, "verbs"]), repr(command.words[0]))
    filled = {choice.group for choice in known}
    pages = [describe_group(group, known) for group in ([only] if only else GROUPS) if only or group in filled]
    chosen = [choice for choice in known if only in ("", choice.group)]
    set_fields(result={"choices": [{"group": row.group, "name": row.name, "summary": row.summary} for row in chosen]})
    print("\n\n".join("\n".join(page) for page in pages))


def describe_group(group: str, known: Sequence[Choice]) -> Iterator[str]:
    """Yield a line about each choice of a group, and about each of the user's own classes that no file names."""
    yield heading(f"{group}: {GROUPS[group]}")
    rows = [(row.name, f"{row.summary}{' (yours)' if row.is_own else ''}") for row in known if row.group == group]
    named = {choice.target for choice in known}
    for path, definition in own_classes():
        if path.partition(".")[0] == group and path not in named:
            summary = definition.sections[""].partition("\n\n")[0].replace("\n", " ")
            rows.append((definition.name, f"{summary} (yours: +{group}.{definition.name}._target_={path})"))
    yield from in_columns(rows or [("-", "none so far")])


def own_classes() -> list[tuple[str, Definition]]:
    """Return the public classes in `callbacks` and `algorithms` of the working directory, with their dotted paths."""
    classes = []
    for package in LISTS:
        if Path(package).resolve() == (SHIPPED / package).resolve():  # in a checkout
            continue
        files = [Path(f"{package}.py"), *sorted(Path(package).glob("[!_]*.py"))]
        for file in files:
            module = ".".join(file.with_suffix("").parts)
            definitions = classes_in(file) if file.is_file() else []
            classes += [(f"{module}.{definition.name}", definition) for definition in definitions]
    return classes
