"""Explains each error in a configuration in one message: the key as typed, what is allowed, the nearest name."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.errors import HydraException
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from runner.cli.catalogue import CONF
from runner.cli.command_line import key_of, typed_value
from runner.cli.nearest import Advice, advice_in, fix_of
from runner.config.sources import files_choosing, files_with
from runner.config.suggestions import about_composing, about_override_first, is_empty_choice
from runner.failures.errors import ConstructorFailed, NoSuchArgument, WrongConfig, WrongKey, cannot_use
from runner.failures.facts import annotate, argument_of, facts_of
from runner.failures.tracebacks import VARIABLE, is_of_user
from runner.timing.event import Event

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError, ImportError)
"""Exceptions that a wrong configuration raises before training. Any other is a bug, shown with its traceback."""


class Explanation(NamedTuple):
    """A text that explains an error in a configuration, with facts about it."""

    text: str
    key: str = ""
    """The config key that the text begins with, if the text also shows the key's value."""
    place: str | None = None
    """The file or line at fault, if it helps to name it."""
    remedy: str = ""
    """What to do; it follows the text and the place."""
    at: str = ""
    """The config key at fault, however the text begins."""
    is_value: bool = False
    """Whether the value of that key is at fault, rather than the key itself."""

    def as_error(self, error: Exception) -> WrongConfig:
        """Return the exception to raise from `error`, with its facts."""
        advice = self.text if isinstance(self.text, Advice) else advice_in(error)
        at = self.at or self.key or advice.key
        facts = facts_of(error)
        meant = facts.meant or getattr(error, "meant", "")  # the intended value
        fix = advice.fix or fix_of(at, advice.meant or meant, self.is_value or bool(meant))
        if self.is_value and not advice.fix and fix and any(word.startswith(f"+{at}=") for word in sys.argv[1:]):
            fix = f"+{fix}"  # without the +, a list would be replaced, and a new key would be refused
        if fix and "=" not in fix and (value := typed_value(sys.argv[1:], at)) is not None:
            fix = f"{fix}={value}"
        converted = WrongConfig(self.message, self.key, at, advice.allowed or facts.allowed, fix)
        annotate(converted, refusal=self.message)
        return converted

    @property
    def message(self) -> str:
        """The text with place and remedy."""
        return self.text + (f" [{self.place}]" if self.place else "") + self.remedy


@contextmanager
def config_errors(event: Event | None = None) -> Iterator[None]:
    """Within the context, turn an exception that a wrong configuration causes into a WrongConfig.

    With an `event`, do so only for exceptions that hooks raise at that event.
    """
    try:
        yield
    except WrongConfig:
        raise
    except CONFIG_ERRORS as error:
        if event is not None and all(raiser.event is not event for raiser in facts_of(error).raisers):
            raise
        explanation = explain(error, sys.argv[1:], CONF)
        raise explanation.as_error(error) from error
    except AssertionError as error:
        file = _file_with_override_before_list(error)
        if file is None:
            raise
        raise WrongConfig(about_override_first(file)) from error
    except RecursionError as error:
        file = _file_including_itself(error)
        if file is None:
            raise
        raise WrongConfig(
            f"{file}: includes itself through its defaults, perhaps by way of another file; remove that entry"
        ) from None


def explain(error: Exception, overrides: Sequence[str], conf: Path) -> Explanation:
    """Return an explanation of an error in a configuration."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, HydraException) or is_empty_choice(error):
        choice = getattr(error, "missing_cfg_file", None) or ""  # of a MissingConfigException
        files = files_choosing(choice, overrides, conf)
        text = about_composing(error, overrides, conf)
        return Explanation(text, place=" and ".join(files) or None, is_value=bool(choice))
    if isinstance(error, OmegaConfBaseException):
        return Explanation(f"{error.full_key or 'config'}: {_reason_of_omegaconf(error)}", at=error.full_key or "")
    if isinstance(error, NoSuchArgument):
        return Explanation(text, remedy=_how_to_remove(error.keys, overrides, conf), at=error.key)
    if isinstance(error, WrongKey):
        files = files_with(error.key, overrides, conf)
        is_value = error.value is not None
        return Explanation(
            text, error.key if is_value else "", " and ".join(files) or None, at=error.key, is_value=is_value
        )
    if isinstance(error, OSError) and error.filename is not None:
        text = cannot_use(error)
    return _with_place(error, text, overrides, conf)


def _reason_of_omegaconf(error: OmegaConfBaseException) -> str:
    """Return the first line of a message, without OmegaConf's prefix for the exception of a resolver.

    OmegaConf keeps a resolver's exception only as text in its own message, after the name of the exception's class.
    The text of an OSError begins with the error number.
    """
    if isinstance(error, MissingMandatoryValue):
        return f"needs a value; write {error.full_key}=..."
    first = str(error).strip().splitlines()[0]
    if isinstance(error, InterpolationKeyError) and (match := re.search(r"'([^']+)'", first)):
        return f"uses ${{{match[1]}}}, but there is no such key; set your own values with +vars.<name>=..."
    return re.sub(r"^\w+ raised while resolving interpolation: (\[Errno \d+\] )?", "", first)


def _file_with_override_before_list(error: AssertionError) -> str | None:
    """Return the file whose defaults have an override before a list, or None if Hydra failed for another reason.

    Hydra fails an assertion here instead of reporting the file, so the file comes from the traceback's frames.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_globals["__name__"] != "hydra.core.default_element":
        return None
    return next((frame.f_locals["pcp"] for frame in reversed(frames) if "pcp" in frame.f_locals), None)


def _file_including_itself(error: RecursionError) -> str | None:
    """Return a file whose defaults include itself, from Hydra's frames, or None if something else recurses."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame.f_globals["__name__"].startswith("hydra.")]
    files = [frame.f_locals["path"] for frame in frames if "path" in frame.f_locals]
    return next((file for file in files if files.count(file) > 1), None)


def _how_to_remove(keys: Sequence[str], overrides: Sequence[str], conf: Path) -> str:
    """Return advice on removing keys that come from config files; empty if all of the keys were typed."""
    typed = {key_of(override) for override in overrides}
    whole = tuple(f"{key_of(item)}." for item in overrides if "={" in item)  # sections typed with all of their keys
    removed = " ".join(f"~{key}" for key in keys if key not in typed and not key.startswith(whole))
    if not removed:
        return ""
    files = [*dict.fromkeys(file for key in keys for file in files_with(key, overrides, conf))]
    if files and not Path(files[0]).resolve().is_relative_to(conf):  # the user's own
        return f". It is set in {files[0]}: correct it there"
    return f". It is set in {' and '.join(files) or 'a file'}: remove it with {removed}"


def _with_place(error: Exception, text: str, overrides: Sequence[str], conf: Path) -> Explanation:
    """Return an explanation with the full config key and its file, or else with the section and a line of user code.

    Section and argument come from the facts that `runner.config.build` added.
    """
    facts = facts_of(error)
    if facts.key:
        files = files_with(facts.key, overrides, conf)
        text = f"{facts.key}{text.removeprefix(facts.argument)}"
        return Explanation(text, facts.key, " and ".join(files) or None)
    if facts.section and facts.section != "trainer":
        at_fault = _override_in(facts.section, text, overrides)
        text = f"{at_fault or facts.section}: {text} ({facts.target})"
        key = key_of(at_fault)
    else:
        argument = argument_of(error)
        key = next((key for key in map(key_of, overrides) if key == f"trainer.{argument}"), argument)
    line = line_of_user(error)
    if line is None and isinstance(error, TypeError):  # Python's message alone rarely explains the error
        last = traceback.extract_tb(error.__traceback__)[-1:]
        raised = (frame for frame in last if not (frame.line or "").startswith("raise "))
        line = next((f"{frame.filename}:{frame.lineno}" for frame in raised), None)
    trace = f"; {VARIABLE}=1 shows the traceback" if isinstance(error, ConstructorFailed) else ""
    return Explanation(text, key, line, trace, at=key or facts.section or _key_of_file(error, overrides))


def _override_in(section: str, text: str, overrides: Sequence[str]) -> str:
    """Return the typed override of a section whose value appears in a library's message; '' unless exactly one does."""
    typed = [item.lstrip("+") for item in overrides if key_of(item).startswith(f"{section}.") and "=" in item]
    values = {item: re.escape(item.partition("=")[2]) for item in typed}
    matching = [item for item, value in values.items() if value and re.search(rf"(?<![\w.-]){value}(?![\w.])", text)]
    return matching[0] if len(matching) == 1 else ""


def _key_of_file(error: Exception, overrides: Sequence[str]) -> str:
    """Return the typed key whose value is an OSError's file, or a path above or below it; '' unless exactly one is."""
    file = getattr(error, "filename", None)
    if not isinstance(file, str):
        return ""
    file = Path(file).absolute()
    typed = {key_of(item): Path(value).absolute() for item in overrides if (value := item.partition("=")[2])}
    keys = [key for key, path in typed.items() if path == file or file in path.parents or path in file.parents]
    return keys[0] if len(keys) == 1 else ""


def line_of_user(error: BaseException) -> str | None:
    """Return the innermost line of user code in a traceback, as `file:line`; None if no user code is in it."""
    if isinstance(error, ConstructorFailed) and error.__cause__ is not None:
        error = error.__cause__
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f"{frame.filename}:{frame.lineno}" for frame in frames if is_of_user(frame.filename)), None)
