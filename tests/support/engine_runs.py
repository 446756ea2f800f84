"""A small run whose algorithms, callbacks and destinations record every event that they receive."""

from __future__ import annotations

from typing import Any

from tiny_runs import make_data, tiny_trainer

from runner import Algorithm, Callback, LoggerDestination, Trainer

HEARD: list[tuple[str, str]] = []


class Hears:
    """Appends its name and the event to `HEARD` at every event."""

    config_key: str

    def __init__(self, name: str):
        self.name = name

    def run_event(self, event, state, logger):
        HEARD.append((self.name, event.name))

    def close(self, state, logger):
        HEARD.append((self.name, "close"))

    def post_close(self):
        HEARD.append((self.name, "post_close"))


class A(Hears, Algorithm):
    """An algorithm that records its events."""


class C(Hears, Callback):
    """A callback that records its events."""


class L(Hears, LoggerDestination):
    """A logger destination that records its events."""


def make_trainer(algorithms: Any = (), callbacks: Any = (), loggers: Any = (), **arguments: Any) -> Trainer:
    """Return a Trainer for two epochs of three batches, and forget the events recorded so far."""
    HEARD.clear()
    data = make_data(6)
    defaults = {"train_dataloader": data, "eval_dataloader": data, "max_duration": "2ep"}
    return tiny_trainer(algorithms=algorithms, callbacks=callbacks, loggers=loggers, **(defaults | arguments))


def names_at(event: str) -> list[str]:
    """Return the names of the objects that received an event, in order."""
    return [name for name, heard in HEARD if heard == event]
