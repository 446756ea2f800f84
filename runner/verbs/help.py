"""`runner help early_stopper`: explains a choice, key, class or verb; `runner --help` lists everything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from runner import __version__
from runner.cli.catalogue import GROUPS, Choice, choices, default_choices, top_keys
from runner.cli.command import Command
from runner.cli.command_line import LISTS, config_dir
from runner.cli.docstrings import Definition, find_definition
from runner.cli.nearest import nearest
from runner.cli.verb import Option, Verb
from runner.cli.verbs import VERBS
from runner.failures.errors import WrongKey
from runner.terminal.console import show_path
from runner.terminal.text import heading, in_columns, paragraphs
from runner.verbs.list import describe_group, own_classes

LINES = (
    ("optimizer.lr=0.05", "sets a value"),
    ("model=mlp", "makes another choice in a group"),
    ("+callbacks=speed_monitor", "adds a callback; +algorithms=... adds an algorithm"),
    ("~callbacks.progress_bar", "removes one"),
    ("-m seed=0,1,2", "a sweep: trains one job for each value"),
    ("--cfg job", "prints the composed config, and trains nothing"),
    ("--config-dir FOLDER", "reads your own config groups from it, instead of from conf/"),
    ("--json", "prints one JSON object for programs, with any verb"),
    ("--version", "prints the version"),
)
MORE = (
    ("runner VERB --help", "explains a verb and its options"),
    ("runner list GROUP", "describes each choice of a group"),
    ("runner help NAME", "explains a choice, key, class or verb"),
    ("runner completion bash", "sets up completion; also zsh and fish"),
    ("docs/, README.md", "guides, and what a run writes"),
)
RUN = "a folder of a run, one of its checkpoints, its MLflow id, its address on a mirror, or latest"
# Arguments that the runner itself supplies, so no config sets them.
GIVEN = ("params", "model", "optimizer", "timestamp")


def run(command: Command) -> None:
    """Print the general help, or the meaning of a name."""
    own = config_dir(command.overrides)
    lines = explain(command.words[0], own) if command.words else overview(own)
    print("\n".join(lines))


def overview(own: Path | None = None) -> Iterator[str]:
    """Yield the lines of `runner --help`."""
    yield heading(f"runner {__version__}: an experiment runner for PyTorch")
    yield "  runner [VERB] [WORDS] [--OPTION VALUE] [KEY=VALUE] [GROUP=CHOICE] ..."
    yield "  or with python -m runner in place of runner"
    yield ""
    yield from in_columns(LINES)
    for group in dict.fromkeys(verb.group for verb in VERBS.values()):
        yield ""
        yield heading(group)
        rows = []
        for verb in VERBS.values():
            if verb.group == group:
                rows += [(verb.name, verb.help), ("", verb.example)]
        yield from in_columns(rows)
    yield ""
    yield heading("Config groups, and their choices")
    rows = []
    for group, purpose in GROUPS.items():
        if names := [choice.name for choice in choices(own) if choice.group == group]:
            rows += [(group, purpose), ("", ", ".join(names))]
    yield from in_columns(rows)
    yield ""
    yield heading("More")
    yield from in_columns(MORE)


def explain(name: str, own: Path | None = None) -> Iterator[str]:
    """Yield explanations of all choices, groups and verbs with a name, or else of the key or class.

    The group may precede the name of a choice, with a dot or as in an override.
    """
    topic = name.lstrip("+").replace("=", ".").replace("/", ".")
    known = choices(own)
    pages = [[*_explain_verb(VERBS[topic])]] if topic in VERBS else []
    if (group := topic.replace(".", "/")) in GROUPS:
        pages.append([*describe_group(group, known)])
    pages += [[*_explain_choice(choice)] for choice in known if topic in _names_of(choice)]
    pages = pages or [page for page in [[*_explain_key(topic, known)]] if page]
    if not pages:
        mine = next((definition for path, definition in own_classes() if topic in (path, definition.name)), None)
        definition = mine or find_definition(topic)
        pages = [] if definition is None else [[*_explain_definition(definition)]]
    if not pages:
        names = [*VERBS, *GROUPS, *(choice.name for choice in known), *(key.name for key in top_keys())]
        near = nearest(topic, {*names})
        instead = near if near.startswith("did") else "runner --help lists everything"
        raise WrongKey("NAME", f"nothing has this name; {instead}", repr(name))
    for number, page in enumerate(pages):
        yield from [""] * (number > 0)
        yield from page


def _names_of(choice: Choice) -> tuple[str, ...]:
    """Return the names of a choice: its own, the one with its group, and that of its class."""
    return (choice.name, f"{choice.group.replace('/', '.')}.{choice.name}", choice.target.rpartition(".")[2])


def _explain_verb(verb: Verb) -> Iterator[str]:
    yield heading(f"runner {verb.name}: {verb.help}")
    options = "[--OPTION VALUE]" if verb.options else ""
    keys = "[KEY=VALUE] ..." if verb.composes else ""
    yield f"  {' '.join(filter(None, ('runner', verb.name, verb.words, options, keys)))}"
    yield ""
    yield from paragraphs(_text_of(verb))
    yield ""
    if verb.uses_run:
        yield from in_columns([("RUN", RUN)])
        yield ""
    if verb.options:
        yield heading("Options, and their defaults")
        yield from in_columns([(_synopsis(option), *_described(option)) for option in verb.options])
        yield ""
    yield heading("Example")
    yield f"  {verb.example}"


def _text_of(verb: Verb) -> str:
    """Return the docstring of a verb's file without the command at its start."""
    file = Path(__file__).with_name(f"{verb.name.replace('-', '_')}.py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    description = text.partition(": ")[2]
    return description[:1].upper() + description[1:]


def _synopsis(option: Option) -> str:
    """Return an option with its possible values, as users type it."""
    if isinstance(option.kind, tuple):
        return f"--{option.name} {'|'.join(option.kind)}"
    value = {bool: "", int: " N", float: " X", str: " TEXT", list: " A,B"}[option.kind]
    return f"--{option.name}{value}"


def _described(option: Option) -> tuple[str, str]:
    """Return the default of an option, empty if it is off, and its description, which includes default names."""
    if isinstance(option.default, tuple):
        return "", ": ".join(filter(None, (option.help, ", ".join(option.default))))
    return "" if option.default is None or option.default is False else str(option.default), option.help


def _explain_choice(choice: Choice) -> Iterator[str]:
    """Yield the description of a choice, its keys with their defaults, and an example."""
    definition = find_definition(choice.target) if choice.target else None
    yield heading(f"{choice.typed}: a choice of {choice.group}{' of your own' if choice.is_own else ''}")
    text = definition.sections[""] if definition is not None else ""
    if choice.group in LISTS and text:  # the comment only shortens the docstring
        yield from paragraphs(text)
    else:
        yield from paragraphs(f"{choice.comment}\n\n{text if choice.package else ''}")
    yield ""
    package = f"{choice.package}{choice.name}." if choice.group in LISTS else choice.package
    if rows := [*_rows_of_keys(choice, package, definition)]:
        yield heading(f"Keys{f' of {package[:-1]}' if package else ''}, and their defaults")
        yield from in_columns(rows)
        yield ""
    for title in ("Logs", "Raises"):
        if definition is not None and (entries := definition.rows(title)):
            yield heading(title)
            yield from in_columns(entries)
            yield ""
    yield heading("Example")
    yield f"  {_example_of(choice, package)}"
    yield ""
    yield heading("Read more")
    files = [show_path(choice.file)]
    if definition is not None:
        files.append(show_path(definition.file.resolve()))  # a checkout is installed through a link
    yield from in_columns([(file,) for file in files])


def _rows_of_keys(choice: Choice, package: str, definition: Definition | None) -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and meaning of each key in a file, then of each argument missing from it."""
    arguments = dict(definition.rows("Args")) if definition is not None and choice.package else {}
    named = [key.name.removeprefix(package) for key in choice.keys]
    for name, key in zip(named, choice.keys, strict=True):
        yield name, key.value, arguments.get(name, key.comment)
    if definition is None or choice.group in ("trainer", "launch"):
        return
    sections = {name.partition(".")[0] for name in named}
    for name, text in arguments.items():
        if name not in (*sections, *GIVEN) and (default := definition.arguments.get(name)):
            yield f"+{name}", default, text


def _example_of(choice: Choice, package: str) -> str:
    """Return a command that makes a choice: the one in its file, or one that sets its first key with a plain value."""
    if choice.command:
        return choice.command.removeprefix("python -m ")
    if choice.group == "vars":
        return f"runner {choice.typed}"
    typed = [] if choice.name in default_choices().get(choice.group, []) else [choice.typed]
    plain = [key for key in choice.keys if key.value[:1] not in ("", "[", "{", "$", "?") and key.value != "null"]
    if package and plain:
        typed.append(f"{plain[0].name}={plain[0].value}")
    return " ".join(["runner", *typed])


def _explain_key(topic: str, known: list[Choice]) -> Iterator[str]:
    """Yield the meaning of a key in each choice that has it; nothing for an unknown key."""
    for key in top_keys():
        if topic == key.name:
            yield heading(f"{key.name}={key.value}")
            yield from paragraphs(key.comment)
            return
    rows = []
    for choice in known:
        # A recipe repeats the keys of other groups.
        keys = choice.keys if choice.package else []
        rows += [(choice.typed, row.value, row.comment) for row in keys if f".{row.name}".endswith(f".{topic}")]
    if rows:
        yield heading(f"{topic}: its default in each choice")
        yield from in_columns(rows)


def _explain_definition(definition: Definition) -> Iterator[str]:
    """Yield the docstring of a class or function, section by section."""
    yield heading(f"{definition.name}: in {show_path(definition.file)}")
    yield from paragraphs(definition.sections[""] or "It has no docstring.")
    described = dict(definition.rows("Args"))
    if rows := [(name, default, described.get(name, "")) for name, default in definition.arguments.items()]:
        yield ""
        yield heading("Arguments, and their defaults")
        yield from in_columns(rows)
    for title in ("Logs", "Returns", "Raises"):
        if entries := definition.rows(title):
            yield ""
            yield heading(title)
            yield from in_columns(entries)
