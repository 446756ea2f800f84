"""A second fit continues the first, and a callback can stop training."""

from __future__ import annotations

import pytest
import torch
from loop_runs import Trace, evaluations, fit_events, make_data, make_trainer

from runner import Callback, Evaluator, Event, Trainer


@pytest.mark.parametrize(
    ("first", "second", "total"), [("3ba", "3ba", 6), ("4ba", "5ba", 9), ("1ep", "1ep", 8), ("6sp", "1ep", 4)]
)
def test_a_second_fit_continues_where_the_first_ended(first: str, second: str, total: int):
    trace = Trace()
    with make_trainer(trace, max_duration=first) as trainer:
        trainer.fit()
        trained = trainer.state.timestamp.batch
        trace.take()
        trainer.fit(duration=second)
    assert trace.events == fit_events(total, start=trained, finds_end=second.endswith("ep"))


def test_several_fits_train_the_same_weights_as_a_single_fit():
    def weights(*durations: str) -> list[torch.Tensor]:
        with make_trainer() as trainer:
            for duration in durations:
                trainer.fit(duration=duration)
        return [parameter.detach() for parameter in trainer.state.unwrapped_model.parameters()]

    whole = weights("9ba")
    for durations in (("4ba", "5ba"), ("1ba", "1ba", "7ba"), ("1ep", "1ep", "2sp")):
        assert all(map(torch.equal, weights(*durations), whole)), durations


def test_a_fit_with_nothing_left_to_train_is_an_error_and_leaves_the_trainer_usable():
    with make_trainer(max_duration="2ba") as trainer:
        trainer.fit()
        with pytest.raises(ValueError, match="max_duration='2ba' is reached: nothing left to train"):
            trainer.fit()
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch == 3


class Stops(Callback):
    """Stops training at the n-th occurrence of an event."""

    def __init__(self, event: Event, nth: int = 1):
        self.event, self.nth = event, nth

    def run_event(self, event, state, logger):
        if event is self.event:
            self.nth -= 1
            if self.nth == 0:
                state.stop_training()


def fit_until(event: Event, nth: int = 1) -> tuple[Trainer, list[str]]:
    """Run a fit that is stopped at the n-th occurrence of an event, and return its Trainer and events."""
    trace = Trace()
    evaluator = Evaluator("eval", make_data(1), eval_interval="1ba")
    trainer = make_trainer(trace, Stops(event, nth), max_duration="5ep", eval_dataloader=evaluator)
    with trainer:
        trace.take()
        trainer.fit()
    return trainer, trace.events


@pytest.mark.parametrize("event", [event for event in Event if not event.name.startswith(("PREDICT", "INIT"))])
def test_a_stop_at_any_event_completes_the_events_of_the_batch(event: Event):
    trainer, events = fit_until(event)
    at_batch = {index: ["eval"] for index in range(1, 21)}
    if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END):
        assert trainer.state.timestamp.epoch == 5, "these events happen before fit or not at all"
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
    assert fit_until(event, nth=4)[1] == fit_events(4, at_batch=at_batch)
    assert fit_until(event, nth=6)[1] == fit_events(6, at_batch=at_batch)


def test_a_stop_at_the_end_of_an_iteration_ends_the_run():
    trace = Trace()
    stops = Stops(Event.ITERATION_END, nth=2)
    with make_trainer(trace, stops, max_duration="9ep", iteration_length="1ep") as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(8, finds_end=True, iteration=1)


def test_another_fit_continues_after_a_stop():
    with make_trainer(Stops(Event.BATCH_END), max_duration="5ba") as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == 1 and trainer.state.stop_requested
        trainer.fit()
        assert trainer.state.timestamp.batch == 5 and not trainer.state.stop_requested
