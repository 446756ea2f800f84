"""Facts about a failure: the hook that raised it, the event and the batch, and the config key at fault.

These facts are data on the exception. Messages and notes tell people the same things, and no code parses them:

    try:
        trainer.fit()
    except ValueError as error:
        facts = facts_of(error)
        print(facts.raised_by, facts.event, facts.timestamp)

Exceptions from other libraries and from users' code carry facts too, so the facts do not depend on a base class. They
are an attribute, `error.facts`, set by any code that knows some and read through `facts_of`. Facts are pickled with the
exception; `to_data` and `from_data` convert them for messages without pickle.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from runner.timing.event import Event
from runner.timing.time import Timestamp


class Raiser(NamedTuple):
    """A callback, algorithm or destination whose method raised an exception or let one through."""

    config_key: str
    """The hook's name in the config."""
    event: Event | None = None
    """The event that the hook was handling; None in `close`, or while a destination was logging."""
    timestamp: Timestamp | None = None
    """The position in training at that event; None without an event."""


@dataclass(frozen=True)
class Facts:
    """The known facts about a failure; an empty field is unknown.

    Attributes:
        raisers: the hooks that raised the exception or let it through, innermost first.
        argument: the name of the refused argument. The message begins with it, as `argument=value`.
        section: the dotted path of the config section at fault, such as `callbacks.lr_monitor`.
        key: the full config key at fault; empty if the argument is not set in the config.
        target: the `_target_` that raised the exception when it was called with its section.
        works_without: the config group without which the failure does not occur.
        refusal: the message for people, if the failure shows that a config is wrong although it could be built.
        allowed: the allowed values instead of the refused one; empty if they cannot be listed.
        meant: the value that was probably meant.
        of_environment: whether the machine failed rather than the program: a process was killed, or a disk is full.
        divergence: the message for people, if the run ended because its loss, or a gradient, is not finite.
    """

    raisers: tuple[Raiser, ...] = ()
    argument: str = ""
    section: str = ""
    key: str = ""
    target: str = ""
    works_without: str = ""
    refusal: str = ""
    allowed: tuple[str, ...] = ()
    meant: str = ""
    of_environment: bool = False
    divergence: str = ""

    @property
    def raised_by(self) -> str:
        """The config key of the hook that raised the exception; empty if no hook did."""
        return self.raisers[0].config_key if self.raisers else ""

    @property
    def event(self) -> Event | None:
        """The event at which the hook in `raised_by` raised the exception; None without an event."""
        return self.raisers[0].event if self.raisers else None

    @property
    def timestamp(self) -> Timestamp | None:
        """The position in training at `event`; None without an event."""
        return self.raisers[0].timestamp if self.raisers else None

    def to_data(self) -> dict[str, Any]:
        """Return the facts as plain containers, ready for JSON."""
        raisers = [
            {"config_key": key, "event": event, "timestamp": None if now is None else now.state_dict()}
            for key, event, now in self.raisers
        ]
        return asdict(replace(self, raisers=())) | {"raisers": raisers}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Facts:
        """Return the facts from the result of `to_data`."""
        raisers = tuple(
            Raiser(
                raiser["config_key"],
                None if raiser["event"] is None else Event(raiser["event"]),
                None if raiser["timestamp"] is None else Timestamp.from_state_dict(raiser["timestamp"]),
            )
            for raiser in data["raisers"]
        )
        return cls(**{**data, "raisers": raisers, "allowed": tuple(data["allowed"])})


UNKNOWN = Facts()
"""Facts with all fields empty."""


def facts_of(error: BaseException) -> Facts:
    """Return the facts about a failure; unknown ones are empty."""
    facts = getattr(error, "facts", None)
    return facts if isinstance(facts, Facts) else UNKNOWN


def annotate(error: BaseException, **facts: Any) -> None:
    """Add facts to an exception; its other facts stay.

    Args:
        error: any exception. The facts of a `RankFailed` are final and stay unchanged.
        facts: values for fields of `Facts`.
    """
    if not getattr(error, "are_facts_final", False):
        vars(error)["facts"] = replace(facts_of(error), **facts)


def add_raiser(
    error: BaseException, config_key: str, event: Event | None = None, timestamp: Timestamp | None = None
) -> None:
    """Add the hook that raised an exception, or let it through, to its facts."""
    annotate(error, raisers=(*facts_of(error).raisers, Raiser(config_key, event, timestamp)))


def argument_of(error: BaseException) -> str:
    """Return the name of the argument that an exception refuses; empty if the exception names none.

    Constructors, including those of users, raise builtin exceptions, which have no attribute for the name. By
    convention their message begins with `name=value`. Only this function parses that; its callers store the name among
    the facts.
    """
    if facts_of(error).argument:
        return facts_of(error).argument
    name, equals, _ = str(error).partition("=")
    return name if equals and all(part.isidentifier() for part in name.split(".")) else ""


# Torch raises a RuntimeError if memory or /dev/shm is full, if the system killed a data loader worker, or if NCCL lost
# a connection or a device.
_OF_TORCH = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|DataLoader worker .* signal: Killed"
    r"|unable to allocate shared memory|nccl(System|Remote|Internal)Error"
)
_SHORTAGES = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)


def is_of_environment(error: BaseException) -> bool:
    """Return whether the machine caused a failure: no space or memory was left, or a process was killed."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or facts_of(link).of_environment:
            return True
        if isinstance(link, OSError) and link.errno in _SHORTAGES:
            return True
        if isinstance(link, RuntimeError) and _OF_TORCH.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def facts_to_report(error: BaseException) -> Facts:
    """Return the facts that another rank needs about a failure, including whether the machine caused it."""
    return replace(facts_of(error), of_environment=is_of_environment(error))
