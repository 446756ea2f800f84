"""An error anywhere closes everything, goes on unchanged, and its notes say where it was raised."""

from __future__ import annotations

import re

import pytest
import torch
from engine_runs import HEARD, A, C, L, make_trainer, names_at
from torch import nn

from runner import Callback, ClassificationModel, Event, LoggerDestination
from runner.failures.facts import Raiser, facts_of


class Fails(Callback):
    """Raises at one event, or in `close` or `post_close`."""

    def __init__(self, at: str, error: BaseException, skip: int = 0):
        self.at, self.error, self.skip = at, error, skip

    def run_event(self, event, state, logger):
        if event.value == self.at:
            self.skip -= 1
            if self.skip < 0:
                raise self.error

    def close(self, state, logger):
        HEARD.append(("fails", "close"))
        if self.at == "close":
            raise self.error

    def post_close(self):
        HEARD.append(("fails", "post_close"))
        if self.at == "post_close":
            raise self.error


class Outcome(LoggerDestination):
    """Notes how the run ended, as one that marks runs would."""

    error: BaseException | str | None = "never closed"

    def close(self, state, logger):
        self.error = state.error


CLOSED = [
    ("c1", "close"),
    ("fails", "close"),
    ("c2", "close"),
    ("a", "close"),
    ("l", "close"),
    ("c1", "post_close"),
    ("fails", "post_close"),
    ("c2", "post_close"),
    ("a", "post_close"),
    ("l", "post_close"),
]


def run_everything(fails: Fails, outcome: Outcome) -> None:
    hooks = {"algorithms": [A("a")], "callbacks": [C("c1"), fails, C("c2")], "loggers": [L("l"), outcome]}
    with make_trainer(**hooks) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])


@pytest.mark.parametrize("event", list(Event))
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_an_error_at_any_event_closes_all_and_goes_on_unchanged(event: Event, kind: type[BaseException]):
    error, outcome = kind("mine"), Outcome()
    with pytest.raises(kind) as raised:
        run_everything(Fails(event.value, error), outcome)
    assert raised.value is error and error.args == ("mine",)
    assert error.__cause__ is None and error.__context__ is None
    assert len(error.__notes__) == 1
    assert re.fullmatch(rf"raised by 'fails' at {event.name}, (in|after) epoch [12]\W.*", error.__notes__[0])
    ((raised_by, at, timestamp),) = facts_of(error).raisers
    assert (raised_by, at) == ("fails", event) and timestamp is not None
    assert [entry for entry in HEARD if entry[1].endswith("close")] == CLOSED, "callbacks first, destinations last"
    assert outcome.error is error, "whoever marks runs knows that this one failed, and why"


def test_the_note_says_which_object_at_which_epoch_and_batch():
    error = ValueError("mine")
    fails = Fails("after_loss", error, skip=4)
    fails.config_key = "my_key"
    with pytest.raises(ValueError), make_trainer(callbacks=[fails]) as trainer:
        trainer.fit()
    assert error.__notes__ == ["raised by 'my_key' at AFTER_LOSS, in epoch 2, after 4 batches"]
    facts = facts_of(error)
    assert facts.timestamp is not None
    assert (facts.raised_by, facts.event, facts.timestamp.batch) == ("my_key", Event.AFTER_LOSS, 4)


def test_the_note_names_an_object_that_is_empty_by_its_own_count():
    class Empty(Callback):
        def __len__(self):
            return 0

        def fit_start(self, state, logger):
            raise ValueError("mine")

    with pytest.raises(ValueError) as raised, make_trainer(callbacks=[Empty()]) as trainer:
        trainer.fit()
    assert raised.value.__notes__ == ["raised by 'empty' at FIT_START, in epoch 1, after 0 batches"]


@pytest.mark.parametrize("at", ["close", "post_close"])
def test_an_error_in_closing_leaves_nobody_unclosed_and_is_raised_at_the_end(at: str):
    error, outcome = OSError("mine"), Outcome()
    with pytest.raises(OSError) as raised:
        run_everything(Fails(at, error), outcome)
    assert raised.value is error
    assert error.__notes__ == [f"raised by fails.{at} while closing; everything else was closed"]
    assert facts_of(error).raisers == (Raiser("fails"),)
    assert [entry for entry in HEARD if entry[1].endswith("close")] == CLOSED
    assert outcome.error is None, "the run itself was all right"


def test_errors_in_closing_after_an_error_are_its_notes():
    error = ValueError("first")
    callbacks = [
        Fails("batch_end", error),
        Fails("close", OSError("second")),
        Fails("post_close", OSError("third")),
        C("c"),
    ]
    outcome = Outcome()
    with pytest.raises(ValueError) as raised, make_trainer(callbacks=callbacks, loggers=outcome) as trainer:
        trainer.fit()
    assert raised.value is error is outcome.error
    assert error.__notes__ == [
        "raised by 'fails' at BATCH_END, in epoch 1, after 1 batch",
        "while closing, fails_2.close raised OSError: second",
        "while closing, fails_3.post_close raised OSError: third",
    ]
    assert names_at("close").count("c") == names_at("post_close").count("c") == 1


def test_an_error_in_the_body_of_with_marks_the_run_failed_too():
    error, outcome = ValueError("mine"), Outcome()
    with pytest.raises(ValueError) as raised, make_trainer(loggers=outcome) as trainer:
        trainer.fit()
        raise error
    assert raised.value is error is outcome.error


@pytest.mark.parametrize("where", ["forward", "loss", "data", "optimizer"])
def test_an_error_outside_of_handlers_closes_all_as_well(where: str):
    error = ValueError("mine")

    class Model(ClassificationModel):
        def forward(self, batch):
            if where == "forward":
                raise error
            return super().forward(batch)

        def loss(self, outputs, batch):
            if where == "loss":
                raise error
            return super().loss(outputs, batch)

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            if where == "optimizer":
                raise error
            return super().step(closure)

    def data():
        yield torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
        if where == "data":
            raise error

    outcome = Outcome()
    trainer = make_trainer(
        loggers=[outcome, L("l")],
        callbacks=[C("c")],
        model=Model(nn.Linear(3, 2), 2),
        train_dataloader=data(),
        max_duration="1ep",
        optimizers=lambda params: Optimizer(params, lr=0.1),
    )
    with pytest.raises(ValueError) as raised:
        trainer.fit()
    assert raised.value is error is outcome.error
    closed = [entry for entry in HEARD if entry[1].endswith("close")]
    assert closed == [("c", "close"), ("l", "close"), ("c", "post_close"), ("l", "post_close")]


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD])
def test_an_error_in_construction_closes_all_once(event: Event):
    with pytest.raises(ValueError):
        make_trainer(callbacks=[C("c"), Fails(event.value, ValueError("mine"))])
    assert names_at("close") == names_at("post_close") == ["c", "fails"]
