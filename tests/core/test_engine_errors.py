"""An error closes all hooks and is raised again, with a note that names the hook, the event and the batch."""

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
    """Records the error with which the run ended, as a destination that marks failed runs does."""

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
def test_an_error_at_any_event_closes_all_hooks_and_is_raised_unchanged(event: Event, kind: type[BaseException]):
    error, outcome = kind("mine"), Outcome()
    with pytest.raises(kind) as caught:
        run_everything(Fails(event.value, error), outcome)
    assert caught.value is error and error.args == ("mine",)
    assert error.__cause__ is None and error.__context__ is None
    assert len(error.__notes__) == 1
    assert re.fullmatch(rf"raised by 'fails' at {event.name}, (in|after) epoch [12]\W.*", error.__notes__[0])
    ((raised_by, at, timestamp),) = facts_of(error).raisers
    assert (raised_by, at) == ("fails", event) and timestamp is not None
    assert [entry for entry in HEARD if entry[1].endswith("close")] == CLOSED, "callbacks first, destinations last"
    assert outcome.error is error


def test_the_note_names_hook_event_epoch_and_batch():
    error = ValueError("mine")
    fails = Fails("after_loss", error, skip=4)
    fails.config_key = "my_key"
    with pytest.raises(ValueError), make_trainer(callbacks=[fails]) as trainer:
        trainer.fit()
    assert error.__notes__ == ["raised by 'my_key' at AFTER_LOSS, in epoch 2, after 4 batches"]
    facts = facts_of(error)
    assert facts.timestamp is not None
    assert (facts.raised_by, facts.event, facts.timestamp.batch) == ("my_key", Event.AFTER_LOSS, 4)


def test_the_note_names_a_hook_whose_length_is_zero():
    class Empty(Callback):
        def __len__(self):
            return 0

        def fit_start(self, state, logger):
            raise ValueError("mine")

    with pytest.raises(ValueError) as caught, make_trainer(callbacks=[Empty()]) as trainer:
        trainer.fit()
    assert caught.value.__notes__ == ["raised by 'empty' at FIT_START, in epoch 1, after 0 batches"]


@pytest.mark.parametrize("method", ["close", "post_close"])
def test_an_error_in_closing_is_raised_after_all_other_hooks_are_closed(method: str):
    error, outcome = OSError("mine"), Outcome()
    with pytest.raises(OSError) as caught:
        run_everything(Fails(method, error), outcome)
    assert caught.value is error
    assert error.__notes__ == [f"raised by fails.{method} while closing; everything else was closed"]
    assert facts_of(error).raisers == (Raiser("fails"),)
    assert [entry for entry in HEARD if entry[1].endswith("close")] == CLOSED
    assert outcome.error is None, "training itself succeeded"


def test_errors_in_closing_become_notes_of_the_error_that_ended_the_run():
    error = ValueError("first")
    callbacks = [
        Fails("batch_end", error),
        Fails("close", OSError("second")),
        Fails("post_close", OSError("third")),
        C("c"),
    ]
    outcome = Outcome()
    with pytest.raises(ValueError) as caught, make_trainer(callbacks=callbacks, loggers=outcome) as trainer:
        trainer.fit()
    assert caught.value is error is outcome.error
    assert error.__notes__ == [
        "raised by 'fails' at BATCH_END, in epoch 1, after 1 batch",
        "while closing, fails_2.close raised OSError: second",
        "while closing, fails_3.post_close raised OSError: third",
    ]
    assert names_at("close").count("c") == names_at("post_close").count("c") == 1


def test_an_error_in_the_with_block_of_a_trainer_is_the_error_of_the_run():
    error, outcome = ValueError("mine"), Outcome()
    with pytest.raises(ValueError) as caught, make_trainer(loggers=outcome) as trainer:
        trainer.fit()
        raise error
    assert caught.value is error is outcome.error


@pytest.mark.parametrize("place", ["forward", "loss", "data", "optimizer"])
def test_an_error_of_model_data_or_optimizer_closes_all_hooks(place: str):
    error = ValueError("mine")

    def fail_in(name: str) -> None:
        if name == place:
            raise error

    class Model(ClassificationModel):
        def forward(self, batch):
            fail_in("forward")
            return super().forward(batch)

        def loss(self, outputs, batch):
            fail_in("loss")
            return super().loss(outputs, batch)

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            fail_in("optimizer")
            return super().step(closure)

    def data():
        yield torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
        fail_in("data")

    outcome = Outcome()
    trainer = make_trainer(
        loggers=[outcome, L("l")],
        callbacks=[C("c")],
        model=Model(nn.Linear(3, 2), 2),
        train_dataloader=data(),
        max_duration="1ep",
        optimizers=lambda params: Optimizer(params, lr=0.1),
    )
    with pytest.raises(ValueError) as caught:
        trainer.fit()
    assert caught.value is error is outcome.error
    closed = [entry for entry in HEARD if entry[1].endswith("close")]
    assert closed == [("c", "close"), ("l", "close"), ("c", "post_close"), ("l", "post_close")]


@pytest.mark.parametrize("event", [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD])
def test_an_error_while_the_trainer_is_made_closes_all_hooks_once(event: Event):
    with pytest.raises(ValueError):
        make_trainer(callbacks=[C("c"), Fails(event.value, ValueError("mine"))])
    assert names_at("close") == names_at("post_close") == ["c", "fails"]
