"""`runner init my_project`: creates a project with a model, data, a callback, an experiment and a test."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from string import Template

from runner.cli.command import Command
from runner.failures.errors import WrongKey
from runner.terminal.answer import set_fields
from runner.terminal.console import print_block, show_path

TEMPLATE = Path(__file__).parent / "project"


def run(command: Command) -> None:
    """Write the files of a new project into a folder that does not exist yet, or is empty."""
    (name,) = command.words
    folder = Path(name).absolute()
    if not name:
        raise WrongKey("FOLDER", "needs a name; write runner init my_project", repr(name))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise WrongKey("FOLDER", "exists already, and nothing is overwritten; give a new folder", repr(name))
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    readme = folder / "README.md"
    readme.write_text(Template(readme.read_text(encoding="utf-8")).safe_substitute(name=folder.name), "utf-8")
    train = f"cd {shlex.quote(show_path(folder))}; python -m runner experiment=two_moons"
    set_fields(result={"folder": str(folder)})
    print_block("a project that runs", [("read", show_path(readme)), ("train", train)])
