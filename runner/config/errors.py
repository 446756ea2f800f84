"""What is wrong with a configuration, in one message: the key as typed, what is allowed, the nearest name."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.command_line import key_of, typed_value
from runner.config.signatures import NoSuchArgument
from runner.config.suggestions import about_composing

CONF = (Path(__file__).resolve().parents[1] / "conf").resolve()

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, OSError, ImportError)
"""What a wrong configuration raises before training; anything else is a fault of the program, and shown as one."""


class WrongConfig(Exception):
    """A configuration that cannot be run; its message is all that a user needs to see."""


class ConstructorFailed(ValueError):
    """What a constructor raised that a wrong value seldom does: it may be at fault itself."""


@contextmanager
def config_errors(event: str = "") -> Iterator[None]:
    """Turn what a wrong configuration raises into a WrongConfig with one message.

    Args:
        event: only what a hook raises at this event; default: all.
    """
    try:
        yield
    except WrongConfig:
        raise
    except CONFIG_ERRORS as error:
        if event and not any(f" at {event}," in note for note in getattr(error, "__notes__", [])):
            raise
        raise WrongConfig(explain(error, sys.argv[1:], CONF)) from error
    except AssertionError as error:
        file = _with_override_before_a_list(error)
        if file is None:
            raise
        raise WrongConfig(f"{file}: in its defaults an override stands before a list; put overrides last") from error


def explain(error: Exception, overrides: Sequence[str], conf: Path) -> str:
    """Return one message about an error in a configuration, of at most a few lines.

    Args:
        error: as Hydra, OmegaConf or a constructor raised it.
        overrides: as typed on the command line.
        conf: the folder of config groups.
    """
    text = str(error).strip() or type(error).__name__
    if isinstance(error, HydraException) or text.startswith("Config group override"):
        return about_composing(error, text, overrides, conf)
    if isinstance(error, OmegaConfBaseException):
        reason = re.sub(r"^\w+ raised while resolving interpolation: (\[Errno \d+\] )?", "", text.splitlines()[0])
        return f"{getattr(error, 'full_key', None) or 'config'}: {reason}"
    if isinstance(error, NoSuchArgument):
        return text + _how_to_remove(error.keys, overrides)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"cannot use {str(error.filename)!r}: {error.strerror}"
    return _with_place(error, text)


def _with_override_before_a_list(error: AssertionError) -> str | None:
    """Return which file has such defaults, where it is that of which Hydra 1.3 fails to make its own message."""
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


def _with_place(error: Exception, text: str) -> str:
    """Return a constructor's message with the key as typed; otherwise with its class, and the line in a user's code.

    The key is in the note that `runner.config.build` added.
    """
    notes = (re.fullmatch(r"in (\S+) \((\S+)\)", note) for note in getattr(error, "__notes__", []))
    for path, target in (note.groups() for note in notes if note is not None):
        name = text.partition("=")[0]
        if path.rpartition(".")[2] == name:
            return f"{path}{text.removeprefix(name)}"
        if path != "trainer":
            text = f"{path}: {text} ({target})"
        break
    place = line_of_user(error)
    if place is None and isinstance(error, TypeError):  # Python's own message alone seldom says what is wrong
        last = traceback.extract_tb(error.__traceback__)[-1:]
        raised = (one for one in last if not (one.line or "").startswith("raise "))
        place = next((f"{one.filename}:{one.lineno}" for one in raised), None)
    trace = "; HYDRA_FULL_ERROR=1 shows the trace" if isinstance(error, ConstructorFailed) else ""
    return text + (f" [{place}]" if place else "") + trace


def line_of_user(error: BaseException) -> str | None:
    """Return the innermost line that neither this project nor a library has, where there is one."""
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
