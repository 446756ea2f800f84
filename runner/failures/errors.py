"""All exceptions of this project. `facts_of(error)` returns further facts about a failure.

ValueError
├─ WrongArgument           an argument has a wrong value
│  ├─ WrongType            or a wrong type: it is a TypeError too
│  └─ WrongKey             a key of a config, an option or a word of a command is wrong
│     └─ NoSuchArgument    keys of a section are not arguments of its target
├─ ConstructorFailed       a constructor raised an exception that wrong values rarely cause
└─ UnreadableCheckpoint    a checkpoint is damaged, or has another format
TypeError
└─ UnsupportedType         a value has a type that is not supported here
RuntimeError
├─ RankFailed              another rank failed first
└─ UnexpectedExit          code of users or libraries tried to end the process
Exception
├─ WrongConfig             a config or command cannot be run: one message, exit code 2
├─ Diverged                a run that a command trained has diverged: exit code 3
├─ JobFailed               a job of a sweep failed, and its log has the traceback
├─ SessionFailed           a run that `runner prove` started failed
└─ Deleted                 a run or an experiment was deleted in MLflow
SystemExit
└─ SessionOver             training stopped, and can be resumed
   ├─ Pruned               because the job is not worth training further
   ├─ Requeued             because a scheduler wants the machine back
   └─ Restarted            because the machine failed, and the command begins again
BaseException
└─ SweepRefused            carries a WrongConfig past Hydra
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.failures.exit_codes import ENVIRONMENT_FAILED
from runner.failures.facts import UNKNOWN, Facts, annotate


class WrongArgument(ValueError):
    """An argument of a function or constructor is wrong. The message is `name=value: reason`.

    Args:
        message: the whole message.
        name: name of the argument.
        value: the refused value.
        reason: what is allowed, and what to do.
    """

    def __init__(self, message: str, name: str = "", value: object = None, reason: str = "") -> None:
        super().__init__(message)  # message only: a DataLoader rebuilds a worker's exception from it
        self.name = name
        self.value = value
        self.reason = reason


class WrongType(WrongArgument, TypeError):
    """An argument has a wrong type."""


class WrongKey(WrongArgument):
    """A key of a config, or an option or a word of a command, is wrong, and the full key is known.

    Args:
        key: the full key.
        reason: what is allowed, and what to do.
        value: the value as typed, in quotes if it is text; None: the message does not show it.
    """

    value: str | None

    def __init__(self, key: str, reason: str, value: str | None = None) -> None:
        super().__init__("", key, value, reason)
        self.args = (key, reason, value)  # pickle calls the constructor with these arguments
        self.key = key
        annotate(self, key=key)

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" if self.value is None else f"{self.key}={self.value}: {self.reason}"


class NoSuchArgument(WrongKey):
    """Some keys of a section are not arguments of its target.

    The keys are given in full, and the message is about the first one.
    """

    def __init__(self, keys: Sequence[str], reason: str) -> None:
        super().__init__(keys[0], reason)
        self.args = (keys, reason)  # pickle calls the constructor with these arguments
        self.keys = keys


class ConstructorFailed(ValueError):
    """A constructor raised an exception that rarely comes from a wrong value, so it may be faulty itself."""


class UnreadableCheckpoint(ValueError):
    """A checkpoint that cannot be read; the message says why."""


class UnsupportedType(TypeError):
    """A value has a type that is not supported here."""

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)  # message only: a DataLoader rebuilds a worker's exception from it
        self.type_name = type_name


class RankFailed(RuntimeError):
    """Another rank failed first; the message ends with that rank's traceback.

    Args:
        rank: the rank that failed.
        trace: the traceback as that rank would print it, or else how its process ended.
        facts: the facts about the failure on that rank.
    """

    are_facts_final = True
    """True, because this rank did not cause the failure, and has no facts to add."""

    def __init__(self, rank: int, trace: str, facts: Facts = UNKNOWN) -> None:
        super().__init__(rank, trace, facts)  # pickle calls the constructor with these arguments
        self.rank = rank
        self.trace = trace.rstrip()
        self.facts = facts
        self.__suppress_context__ = True  # errors that the failure caused on this rank would hide its cause

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.trace}"


class UnexpectedExit(RuntimeError):
    """A data set, model or hook, or a library that it calls, raised an exception that would end the process."""


class WrongConfig(Exception):
    """A configuration cannot be run; the user needs to see nothing but the message.

    Args:
        message: the fault, and what to do about it.
        key: the config key that the message begins with, if the message also shows the key's value.
        at: the config key at fault, however the message begins; empty if no single key is.
        allowed: the allowed values or names; empty if they cannot be listed.
        fix: an argument to type instead of the wrong one; empty if unknown.
    """

    def __init__(self, message: str, key: str = "", at: str = "", allowed: Sequence[str] = (), fix: str = "") -> None:
        super().__init__(message)
        self.key = key
        self.at = at or key
        self.allowed = tuple(allowed)
        self.fix = fix

    def __reduce__(self) -> Any:
        """Keep the fields when the exception is pickled, for jobs of a sweep that another process checks."""
        return type(self), (str(self), self.key, self.at, self.allowed, self.fix)


class Diverged(Exception):
    """The loss or the objective of a run is NaN or infinite, or the run has too many spikes."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.facts = Facts(divergence=message)


class JobFailed(Exception):
    """A job failed: its folder holds the result, and the log with the traceback."""


class SessionFailed(Exception):
    """A session ended on its own with an error."""


class Deleted(Exception):
    """A run or experiment was deleted in MLflow, and accepts no data until it is restored.

    Until then, its data stays in the register of unsent runs.
    """


class SessionOver(SystemExit):
    """The time of this session is over: training has stopped between two batches, and can be resumed. Exit code 0."""

    status = "PAUSED"
    """Status of the run in `result.json`."""


class Pruned(SessionOver):
    """A job of a sweep was not worth training further: it has stopped between two batches, and can be revived."""

    status = "PRUNED"


class Requeued(SessionOver):
    """A scheduler wants the machine back: the job returns to the queue, and resumes when it runs again."""

    status = "QUEUED"


class Restarted(SessionOver):
    """The machine has failed, and the command, or the job of the sweep, restarts from the newest checkpoint."""

    status = "QUEUED"

    def __init__(self, reason: str) -> None:
        super().__init__(ENVIRONMENT_FAILED)
        self.reason = reason
        """The failure, and the batch that the run continues from."""


class SweepRefused(BaseException):
    """Carries a WrongConfig past Hydra, which turns any Exception raised by its callbacks into a warning."""

    def __init__(self, error: WrongConfig) -> None:
        self.error = error


def wrong_argument(
    name: str, value: object, reason: str, kind: type[Exception] = ValueError, **facts: Any
) -> Exception:
    """Return an exception for a wrong argument, with the message `name=value: reason`.

    Args:
        name: name of the argument.
        value: the refused value.
        reason: what is allowed, and what to do.
        kind: ValueError for a WrongArgument, TypeError for a WrongType, or another class to make.
        facts: further fields of `Facts`, such as `allowed`.
    """
    message = f"{name}={value!r}: {reason}"
    ours = {ValueError: WrongArgument, TypeError: WrongType}.get(kind)
    error = kind(message) if ours is None else ours(message, name, value, reason)
    annotate(error, argument=name, **facts)
    return error


def divergence(message: str) -> FloatingPointError:
    """Return the exception with which a callback or an algorithm ends a diverged run."""
    error = FloatingPointError(message)
    annotate(error, divergence=f"the run has diverged: {message}")
    return error


def cannot_use(error: OSError) -> str:
    """Return the message for a file or folder that cannot be used."""
    return f"cannot use {str(error.filename)!r}: {error.strerror}"
