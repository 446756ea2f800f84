"""`mode=init`, typed as `runner init my_project`: a new project with a model, data, a callback and an experiment."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from runner.config.errors import config_errors
from runner.distributed.job import Job
from runner.failures.facts import WrongKey
from runner.terminal.answer import give
from runner.terminal.console import print_block, show_path

TEMPLATE = Path(__file__).parent / "project"


def write_project(job: Job) -> None:
    """Write the files of a new project into the folder that `init` names. Rank 0 alone."""
    folder = Path(str(job.config["init"])).absolute()
    with config_errors():
        shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        readme = folder / "README.md"
        readme.write_text(Template(readme.read_text(encoding="utf-8")).safe_substitute(name=folder.name), "utf-8")
    train = f"cd {shlex.quote(show_path(folder))}; python -m runner experiment=two_moons"
    rows = [("read", show_path(readme)), ("train", train)]
    give(result={"folder": str(folder)})
    print_block("a project that runs", rows)


def check_folder(config: Mapping[str, Any]) -> None:
    """Check that `init` names a folder that does not exist yet, or that is empty."""
    name = config["init"]
    if not isinstance(name, str | int) or isinstance(name, bool) or not str(name):
        raise WrongKey("init", "must be the folder of a new project; write runner init my_project", repr(name))
    folder = Path(str(name))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise WrongKey("init", "is there already, and nothing is overwritten; give a new folder", repr(name))
