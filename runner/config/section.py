"""A section of a config, which describes an object and can check and make it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hydra.utils
from hydra.errors import InstantiationException

from runner.config.composed import targets
from runner.config.errors import CONFIG_ERRORS
from runner.config.signatures import check_signature, locate, taken_as_options
from runner.failures.errors import ConstructorFailed, WrongConfig
from runner.failures.exits import as_failure
from runner.failures.facts import annotate, argument_of, facts_of
from runner.libraries.targets import find_in_working_directory, prepare_import


@dataclass(frozen=True)
class Section:
    """A part of a config that describes one object.

    Attributes:
        path: the dotted path in the config, such as `callbacks.progress_bar`.
        plain: its `_target_` and arguments, as plain containers.
    """

    path: str
    plain: Mapping[str, Any]

    @property
    def target(self) -> str:
        """The dotted path of the class or function to call."""
        return str(self.plain["_target_"])

    @property
    def key(self) -> str:
        """Its name in its group, such as `progress_bar`."""
        return self.path.partition(".")[2]

    def get(self, argument: str, default: Any = None) -> Any:
        """Return the value of an argument, or `default`."""
        return self.plain.get(argument, default)

    def __contains__(self, argument: str) -> bool:
        return argument in self.plain

    def changed(self, **arguments: Any) -> Section:
        """Return this section with new values for some arguments."""
        return Section(self.path, {**self.plain, **arguments})

    def without(self, *arguments: str) -> Section:
        """Return this section without some arguments."""
        return Section(self.path, {key: value for key, value in self.plain.items() if key not in arguments})

    def nested(self) -> Iterator[Section]:
        """Yield this section and those of the objects among its arguments, outer ones first."""
        return (Section(path, section) for path, section in targets(self.plain, self.path))

    def find_target(self) -> Any:
        """Return the class or function to call."""
        return locate(self.path, self.plain["_target_"])

    def check(self, supplied: Iterable[str] = ()) -> None:
        """Check that the target exists and takes the arguments, including those `supplied` by code."""
        check_signature(self.path, self.plain, supplied)

    def unchecked(self) -> list[str]:
        """Return the arguments that the target takes as `**options`, and so may ignore."""
        return taken_as_options(self.path, self.plain)

    def make(self, among: Sequence[Section] = (), **supplied: Any) -> Any:
        """Return the object, made with the arguments of the section and those `supplied` by code.

        Args:
            among: sections of supplied objects, which may also be at fault if the constructor fails.
            supplied: arguments that code adds.

        Raises:
            Exception: the constructor fails; the facts of the exception name the section.
        """
        find_in_working_directory(self.plain)
        with self.named(among):
            for inner in self.nested():  # only rank 0 ran the checks, which import the targets
                prepare_import(inner.target)
            if supplied:
                return hydra.utils.instantiate({**self.plain, "_partial_": True}, _convert_="all")(**supplied)
            return hydra.utils.instantiate(self.plain, _convert_="all")

    @contextmanager
    def named(self, among: Sequence[Section] = ()) -> Iterator[None]:
        """Add the faulty section, this one or one of `among`, to any exception, as facts and as a note."""
        try:
            yield
        except SystemExit as exit:
            if not isinstance(exit.code, str):
                failure = as_failure(exit)  # the exit itself, if a signal has asked the process to end
                raise failure from failure.__cause__
            raise WrongConfig(f"{self.path}: {exit.code} ({self.target})", at=self.path) from exit
        except Exception as error:
            cause = error
            failed = self.path
            if isinstance(error, InstantiationException):
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                inner = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)  # of a target inside the section
                failed = f"{self.path}.{inner[1]}" if inner else self.path
            if not isinstance(cause, CONFIG_ERRORS) and self.path != "trainer":  # the Trainer's hooks may have bugs
                failure = ConstructorFailed(f"{type(cause).__name__}: {cause}".removesuffix(": "))
                failure.__cause__ = cause
                cause = failure
            if not note_section_of_hook(cause, among):
                _note_section(cause, self, among, failed)
            raise cause from cause.__cause__


def sections_in(group: str, plain: Mapping[str, Any] | None) -> dict[str, Section]:
    """Return the sections of a group by key; those without a target are left out."""
    nested = {str(key): value for key, value in (plain or {}).items() if isinstance(value, Mapping)}
    return {key: Section(f"{group}.{key}", value) for key, value in nested.items() if "_target_" in value}


def note_section_of_hook(error: BaseException, sections: Sequence[Section]) -> bool:
    """Add to an exception the section of the callback or algorithm that raised it; return whether one did."""
    raised_by = facts_of(error).raised_by
    paths = (f"callbacks.{raised_by}", f"algorithms.{raised_by}", *(["scheduler"] if raised_by == "scheduler" else []))
    for path in paths:
        for section in sections:
            if section.path == path:
                _note_section(error, section, sections)
                return True
    return False


def _note_section(error: BaseException, section: Section, among: Sequence[Section], failed: str = "") -> None:
    """Add to an exception the section of the config that caused it, both as facts and as a note.

    The section at fault is the one that sets the argument that the exception names, perhaps in another part of the
    config. If the exception names no argument, it is the section of the target that failed; `failed` is its path if it
    is inside `section`.
    """
    argument = argument_of(error)
    inside = {nested.path: nested for nested in section.nested()}
    fallback = failed if failed in inside else section.path
    owners = [owner.path for owner in [*inside.values(), *among] if argument.partition(".")[0] in owner]
    annotate(error, argument=argument, section=owners[0] if owners else fallback, target=inside[fallback].target)
    if owners:
        annotate(error, key=f"{owners[0]}.{argument}")
    error.add_note(f"in {facts_of(error).key or fallback} ({inside[fallback].target})")
