"""What is wrong with a configuration, in one message: the key as typed, what is allowed, the nearest name."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.command_line import key_of, typed_value
from runner.config.signatures import NoSuchArgument
from runner.config.suggestions import about_composing, is_empty_choice
from runner.event import Event
from runner.failures import WrongKey, argument_of, facts_of

CONF = (Path(__file__).resolve().parents[1] / "conf").resolve()

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError, ImportError)
"""What a wrong configuration raises before training; anything else is a bug, and is shown with its trace."""


class WrongConfig(Exception):
    """A configuration that cannot be run; its message is all that a user needs to see.

    Args:
        message: what is wrong and what to do.
        key: the key of the config with which the message begins, where it shows that key's value too.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ConstructorFailed(ValueError):
    """What a constructor raised that a wrong value seldom causes: the constructor may be at fault itself."""


class Explanation(NamedTuple):
    """What is wrong with a configuration, for people, and the facts that the text was made of."""

    text: str
    key: str = ""
    """The key of the config with which the text begins, where it shows that key's value too."""
    place: str | None = None
    """File and line, where they are worth knowing."""
    remedy: str = ""

    @property
    def message(self) -> str:
        """All of it, in at most a few lines."""
        return self.text + (f" [{self.place}]" if self.place else "") + self.remedy


@contextmanager
def config_errors(event: Event | None = None) -> Iterator[None]:
    """Turn what a wrong configuration raises into a WrongConfig with one message.

    Args:
        event: only what a hook raises at this event; None: whatever is raised.
    """
    try:
        yield
    except WrongConfig:
        raise
    except CONFIG_ERRORS as error:
        if event is not None and all(one.event is not event for one in facts_of(error).raisers):
            raise
        explanation = explain(error, sys.argv[1:], CONF)
        raise WrongConfig(explanation.message, explanation.key) from error
    except AssertionError as error:
        file = _with_override_before_a_list(error)
        if file is None:
            raise
        raise WrongConfig(f"{file}: in its defaults an override stands before a list; put overrides last") from error


def explain(error: Exception, overrides: Sequence[str], conf: Path) -> Explanation:
    """Return what is wrong with a configuration, as one message and the facts behind it.

    Args:
        error: as Hydra, OmegaConf or a constructor raised it.
        overrides: as typed on the command line.
        conf: the folder of config groups.
    """
    text = str(error).strip() or type(error).__name__
    if isinstance(error, HydraException) or is_empty_choice(error):
        return Explanation(about_composing(error, overrides, conf))
    if isinstance(error, OmegaConfBaseException):
        return Explanation(f"{error.full_key or 'config'}: {_reason_of_omegaconf(error)}")
    if isinstance(error, NoSuchArgument):
        return Explanation(text, remedy=_how_to_remove(error.keys, overrides))
    if isinstance(error, WrongKey):
        return Explanation(text, error.key if error.value is not None else "")
    if isinstance(error, OSError) and error.filename is not None:
        text = f"cannot use {str(error.filename)!r}: {error.strerror}"
    return _with_place(error, text)


def _reason_of_omegaconf(error: OmegaConfBaseException) -> str:
    """Return the first line of a message, without the words that only say that a resolver raised it.

    OmegaConf 2.3 keeps the exception of a resolver in its own message alone, after the name of its class; that of an
    OSError begins with the number.
    """
    first = str(error).strip().splitlines()[0]
    return re.sub(r"^\w+ raised while resolving interpolation: (\[Errno \d+\] )?", "", first)


def _with_override_before_a_list(error: AssertionError) -> str | None:
    """Return the file whose defaults have an override before a list, where that is why Hydra failed.

    Hydra 1.3 fails to make its own message about it, so the file is found in the frames of its traceback.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_globals["__name__"] != "hydra.core.default_element":
        return None
    return next((frame.f_locals["pcp"] for frame in reversed(frames) if "pcp" in frame.f_locals), None)


def _how_to_remove(keys: Sequence[str], overrides: Sequence[str]) -> str:
    """Return how to do without keys that stand in the files of the config, and were not typed."""
    typed = {key_of(one) for one in overrides}
    removed = " ".join(f"~{key}" for key in keys if key not in typed)
    experiment = typed_value(overrides, "experiment")
    if not removed:
        return ""
    where = f"experiment={experiment} or another file" if experiment else "a file"
    return f". It is set by {where}: remove it with {removed}"


def _with_place(error: Exception, text: str) -> Explanation:
    """Return a message with the key as it was typed; otherwise with its section, and the line in a user's code.

    Section and argument are the facts that `runner.config.build` added.
    """
    facts = facts_of(error)
    if facts.key:
        return Explanation(f"{facts.key}{text.removeprefix(facts.argument)}", facts.key)
    if facts.section and facts.section != "trainer":
        text, key = f"{facts.section}: {text} ({facts.target})", ""
    else:
        key = argument_of(error)
    place = line_of_user(error)
    if place is None and isinstance(error, TypeError):  # Python's own message alone seldom says what is wrong
        last = traceback.extract_tb(error.__traceback__)[-1:]
        raised = (one for one in last if not (one.line or "").startswith("raise "))
        place = next((f"{one.filename}:{one.lineno}" for one in raised), None)
    trace = "; HYDRA_FULL_ERROR=1 shows the trace" if isinstance(error, ConstructorFailed) else ""
    return Explanation(text, key, place, trace)


def line_of_user(error: BaseException) -> str | None:
    """Return the innermost line of the trace that belongs to neither this project nor a library, if there is one."""
    if isinstance(error, ConstructorFailed) and error.__cause__ is not None:
        error = error.__cause__
    home = CONF.parent
    own = [home / name for name in ("runner", "callbacks", "algorithms")]
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        known = any(path.is_relative_to(one) for one in (*own, *libraries))
        if path.is_absolute() and not known and "site-packages" not in path.parts:
            return f"{path}:{frame.lineno}"
    return None
