"""Implement the verbs of the command line, each in a file of its name; `runner.cli.verbs` lists them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.cli.verb import Verb


def module_of(verb: Verb) -> ModuleType:
    """Import and return the module of a verb.

    Its function `run` takes the job and returns the objective, if any. For a verb that composes no config, `run` takes
    the command and returns the exit code, or None for 0. An optional function `check(command, experiment)` raises an
    error if the command cannot run.
    """
    return import_module(f"{__name__}.{verb.name.replace('-', '_')}")
