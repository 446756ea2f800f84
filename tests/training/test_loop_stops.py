"""Going on where the last fit ended, and stopping when a callback asks for it."""

from __future__ import annotations

import pytest
import torch
from loop_runs import Trace, evaluations, fit_events, make_data, make_trainer

from runner import Callback, Evaluator, Event, Trainer


@pytest.mark.parametrize(
    ("first", "then", "total"), [("3ba", "3ba", 6), ("4ba", "5ba", 9), ("1ep", "1ep", 8), ("6sp", "1ep", 4)]
)
def test_fit_goes_on_where_it_was(first: str, then: str, total: int):
    trace = Trace()
    with make_trainer(trace, max_duration=first) as trainer:
        trainer.fit()
        trained = trainer.state.timestamp.batch
        trace.take()
        trainer.fit(duration=then)
    assert trace.events == fit_events(total, start=trained, finds_end=then.endswith("ep"))


def test_two_fits_train_what_one_does():
    def weights(*durations: str) -> list[torch.Tensor]:
        with make_trainer() as trainer:
            for duration in durations:
                trainer.fit(duration=duration)
        return [one.detach() for one in trainer.state.unwrapped_model.parameters()]

    whole = weights("9ba")
    for parts in (("4ba", "5ba"), ("1ba", "1ba", "7ba"), ("1ep", "1ep", "2sp")):
        for one, other in zip(weights(*parts), whole, strict=True):
            assert torch.equal(one, other), parts


def test_nothing_left_to_train_is_an_error_and_the_trainer_goes_on():
    with make_trainer(max_duration="2ba") as trainer:
        trainer.fit()
        with pytest.raises(ValueError, match="max_duration='2ba' is reached: nothing left to train"):
            trainer.fit()
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch == 3


class Stops(Callback):
    """Asks for the end of training at one event, the first or the n-th time it fires."""

    def __init__(self, event: Event, nth: int = 1):
        self.event, self.nth = event, nth

    def run_event(self, event, state, logger):
        if event is self.event:
            self.nth -= 1
            if self.nth == 0:
                state.stop_training()


def stopped(event: Event, nth: int = 1) -> tuple[Trainer, list[str]]:
    trace = Trace()
    evaluator = Evaluator("eval", make_data(1), eval_interval="1ba")
    trainer = make_trainer(trace, Stops(event, nth), max_duration="5ep", eval_dataloader=evaluator)
    with trainer:
        trace.take()
        trainer.fit()
    return trainer, trace.events


@pytest.mark.parametrize("event", [event for event in Event if not event.name.startswith(("PREDICT", "INIT"))])
def test_a_stop_asked_for_at_any_event_ends_training_in_order(event: Event):
    trainer, events = stopped(event)
    at_batch = {index: ["eval"] for index in range(1, 21)}
    if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END):
        assert trainer.state.timestamp.epoch == 5, "asked for before fit, or never"
    elif event is Event.FIT_START:
        assert events == ["FIT_START", *evaluations(["eval"]), "FIT_END"]
    elif event in (Event.ITERATION_END, Event.ITERATION_CHECKPOINT, Event.FIT_END):
        assert trainer.state.timestamp.epoch == 5, "the whole run is one iteration"
    elif event in (Event.EPOCH_END, Event.EPOCH_CHECKPOINT):
        assert events == fit_events(4, finds_end=True, at_batch=at_batch)
    else:
        assert events == fit_events(1, at_batch=at_batch)


@pytest.mark.parametrize("event", [Event.BEFORE_FORWARD, Event.BATCH_END, Event.EVAL_END, Event.BATCH_CHECKPOINT])
def test_a_stop_in_the_last_batch_of_an_epoch_ends_the_epoch(event: Event):
    at_batch = {index: ["eval"] for index in range(1, 21)}
    assert stopped(event, nth=4)[1] == fit_events(4, at_batch=at_batch)
    assert stopped(event, nth=6)[1] == fit_events(6, at_batch=at_batch)


def test_a_stop_at_the_end_of_an_iteration_ends_the_run():
    trace = Trace()
    stops = Stops(Event.ITERATION_END, nth=2)
    with make_trainer(trace, stops, max_duration="9ep", iteration_length="1ep") as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(8, finds_end=True, iteration=1)


def test_fit_goes_on_after_a_stop():
    with make_trainer(Stops(Event.BATCH_END), max_duration="5ba") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 1 and trainer.state.stop_requested
        trainer.fit()
        assert trainer.state.timestamp.batch == 5 and not trainer.state.stop_requested
