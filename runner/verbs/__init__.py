"""What each verb of the command line does, in a file of its name; `runner.cli.verbs` lists them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.cli.verb import Verb


def module_of(verb: Verb) -> ModuleType:
    """Return the module of a verb, imported now.

    Its function `run` takes the job and returns the objective, if any; that of a verb that composes nothing takes the
    command, and returns the exit code or None for 0. A function `check(command, experiment)`, if there is one, raises
    an error if the command cannot be run.
    """
    return import_module(f"{__name__}.{verb.name.replace('-', '_')}")
