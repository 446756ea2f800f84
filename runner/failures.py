"""What is known about a failure: who raised it, at which event and batch, and which key of the config it is about.

These facts are data on the exception. Messages and notes say the same to people, and no code reads them:

    try:
        trainer.fit()
    except ValueError as error:
        facts = facts_of(error)
        print(facts.raised_by, facts.event, facts.timestamp)

Exceptions of other libraries and of users carry facts too, so there is no base class of our own: the facts are one
attribute, `error.facts`, which is added where something is known and read through `facts_of`. They are pickled with the
exception; `to_data` and `from_data` send them where pickle is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from runner.event import Event
from runner.time import Timestamp


class Raiser(NamedTuple):
    """A callback, algorithm or destination whose method raised an exception or let it through."""

    config_key: str
    """Its name in the config."""
    event: Event | None = None
    """The event that was handled; None in `close`, or where a value was logged."""
    timestamp: Timestamp | None = None
    """The position in training, where there was an event."""


@dataclass(frozen=True)
class Facts:
    """What is known about a failure; a field that is empty is not known.

    Attributes:
        raisers: hooks that raised the exception or let it through, the innermost first.
        argument: name of the argument that was refused. The message begins with it, as `argument=value`.
        section: dotted path of the section of the config that is at fault, such as `callbacks.lr_monitor`.
        key: full key of what is wrong in the config; an argument that is not set there has none.
        target: the `_target_` that raised the exception when it was called with its section.
        works_without: group of the config without which the failure does not occur.
    """

    raisers: tuple[Raiser, ...] = ()
    argument: str = ""
    section: str = ""
    key: str = ""
    target: str = ""
    works_without: str = ""

    @property
    def raised_by(self) -> str:
        """Config key of the hook that raised the exception; empty where no hook did."""
        return self.raisers[0].config_key if self.raisers else ""

    @property
    def event(self) -> Event | None:
        """The event at which that hook raised it."""
        return self.raisers[0].event if self.raisers else None

    @property
    def timestamp(self) -> Timestamp | None:
        """The position in training at that event."""
        return self.raisers[0].timestamp if self.raisers else None

    def to_data(self) -> dict[str, Any]:
        """Return the facts as plain containers that JSON can hold."""
        raisers = [
            {"config_key": key, "event": event, "timestamp": None if now is None else now.state_dict()}
            for key, event, now in self.raisers
        ]
        return asdict(replace(self, raisers=())) | {"raisers": raisers}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Facts:
        """Return the facts that `to_data` turned into plain containers."""
        raisers = tuple(
            Raiser(
                one["config_key"],
                None if one["event"] is None else Event(one["event"]),
                None if one["timestamp"] is None else Timestamp.from_state_dict(one["timestamp"]),
            )
            for one in data["raisers"]
        )
        return cls(**{**data, "raisers": raisers})


UNKNOWN = Facts()
"""Of a failure about which nothing is known."""


def facts_of(error: BaseException) -> Facts:
    """Return what is known about a failure; all fields are empty where nothing is."""
    facts = getattr(error, "facts", None)
    return facts if isinstance(facts, Facts) else UNKNOWN


def annotate(error: BaseException, **facts: Any) -> None:
    """Add facts to an exception; others that it has stay.

    Args:
        error: any exception. A `RankFailed` stays as it is: what happens to it on this rank is not why it was raised.
        facts: fields of `Facts`.
    """
    if not isinstance(error, RankFailed):
        vars(error)["facts"] = replace(facts_of(error), **facts)


def add_raiser(
    error: BaseException, config_key: str, event: Event | None = None, timestamp: Timestamp | None = None
) -> None:
    """Add to the facts of an exception that a hook raised it, or let it through.

    Args:
        error: any exception.
        config_key: the hook's name in the config.
        event: the event that it handled, if any.
        timestamp: the position in training at that event.
    """
    annotate(error, raisers=(*facts_of(error).raisers, Raiser(config_key, event, timestamp)))


def wrong_argument(name: str, value: object, reason: str, kind: type[Exception] = ValueError) -> Exception:
    """Return the exception of an argument that is wrong; its message is `name=value: reason`.

    Args:
        name: the argument's name.
        value: as it was given.
        reason: what is allowed, and what to do.
        kind: class of the exception.
    """
    error = kind(f"{name}={value!r}: {reason}")
    annotate(error, argument=name)
    return error


def argument_of(error: BaseException) -> str:
    """Return the name of the argument that an exception refuses; empty where it names none.

    Builtin exceptions have no attribute for it, and constructors, also those of users, raise builtin exceptions. By
    convention their message begins with `name=value`, and this function alone looks there: its callers store what it
    finds among the facts.
    """
    if facts_of(error).argument:
        return facts_of(error).argument
    name, equals, _ = str(error).partition("=")
    return name if equals and all(part.isidentifier() for part in name.split(".")) else ""


class WrongKey(ValueError):
    """A key of the config is wrong, and its full name is known where that is found out.

    Args:
        key: in full.
        reason: what is allowed, and what to do.
        value: as it was typed, with quotes where it is text; None: the message does not show it.
    """

    def __init__(self, key: str, reason: str, value: str | None = None) -> None:
        super().__init__(key, reason, value)  # what pickle calls it with
        annotate(self, key=key)
        self.key = key
        self.reason = reason
        self.value = value

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" if self.value is None else f"{self.key}={self.value}: {self.reason}"


class RankFailed(RuntimeError):
    """Another rank failed first; the message ends in its trace.

    Args:
        rank: the rank that failed.
        trace: as that rank would print it, or how it ended where it could not say more.
        facts: what is known about the failure on that rank.
    """

    def __init__(self, rank: int, trace: str, facts: Facts = UNKNOWN) -> None:
        super().__init__(rank, trace, facts)  # what pickle calls it with
        self.rank = rank
        self.trace = trace.rstrip()
        self.facts = facts
        self.__suppress_context__ = True  # what follows from the failure on this rank would bury it

    def __str__(self) -> str:
        return f"rank {self.rank} failed:\n{self.trace}"


class UnsupportedType(TypeError):
    """A value is of a type that cannot be used where it stands.

    Args:
        message: says where it stands, and what is allowed.
        type_name: name of its class.
    """

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)  # alone, as a DataLoader makes it anew from the message of a worker's exception
        self.type_name = type_name
