"""Which hooks are called at an event, in which order, and by which names events can be fired."""

from __future__ import annotations

import sys

import pytest
import torch
from engine_runs import HEARD, A, C, L, make_trainer, names_at
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Event


def test_each_event_calls_algorithms_then_callbacks_then_loggers():
    algorithms, callbacks, loggers = ([kind(f"{kind.__name__}{i}") for i in (1, 2)] for kind in (A, C, L))
    with make_trainer(algorithms, callbacks, loggers) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])
        for event in Event:
            expected = ["A1", "A2", "C1", "C2", "L1", "L2"]
            if event is Event.INIT:
                expected = ["L1", "L2", "C1", "C2", "A1", "A2"]
            if event.name in (
                "AFTER_FORWARD",
                "AFTER_LOSS",
                "AFTER_BACKWARD",
                "AFTER_TRAIN_BATCH",
                "EVAL_AFTER_FORWARD",
                "PREDICT_AFTER_FORWARD",
            ):
                expected[:2] = ["A2", "A1"]
            called = names_at(event.name)
            assert called and called == expected * (len(called) // 6), event
            names = [getattr(listener, "name", None) for listener in trainer.engine.listeners(event)]
            assert [name for name in names if name] == expected


def test_algorithms_act_in_reverse_order_at_the_event_after_a_pass():
    with make_trainer([A("outer"), A("inner")], max_duration="1ba", eval_dataloader=None) as trainer:
        trainer.fit()
    calls = [(name, event) for name, event in HEARD if "FORWARD" in event]
    assert calls == [
        ("outer", "BEFORE_FORWARD"),
        ("inner", "BEFORE_FORWARD"),
        ("inner", "AFTER_FORWARD"),
        ("outer", "AFTER_FORWARD"),
    ]
    assert [name for name, event in HEARD if event == "AFTER_DATALOADER"] == ["outer", "inner"]
    assert [name for name, event in HEARD if event == "AFTER_LOAD"] == ["outer", "inner"]


def test_making_a_trainer_fires_init_and_both_load_events_without_a_checkpoint_too():
    with make_trainer(callbacks=C("c")):
        assert HEARD == [("c", "INIT"), ("c", "BEFORE_LOAD"), ("c", "AFTER_LOAD")]


def test_optimizers_and_schedulers_are_made_after_init():
    class ChecksState(Callback):
        def init(self, state, logger):
            assert state.optimizers == [] and state.schedulers == []
            assert next(state.unwrapped_model.parameters()).device == state.device

        def before_load(self, state, logger):
            assert len(state.optimizers) == len(state.schedulers) == 1

    class RemovesBias(Algorithm):
        def init(self, state, logger):
            state.unwrapped_model.module = nn.Linear(3, 2, bias=False)

    schedulers = {"schedulers": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with make_trainer([RemovesBias()], [ChecksState()], **schedulers) as trainer:
        (group,) = trainer.state.optimizers[0].param_groups
        assert [parameter.shape for parameter in group["params"]] == [(2, 3)]
        trainer.fit()


@pytest.mark.parametrize("event", list(Event))
def test_run_event_accepts_an_event_its_value_and_its_name(event: Event):
    model = ClassificationModel(nn.Linear(3, 2), 2)
    model.metrics = lambda train: {}  # type: ignore[method-assign]
    with make_trainer(callbacks=[C("c")], model=model) as trainer:
        HEARD.clear()
        for spelling in (event, event.value, event.name):
            trainer.engine.run_event(spelling)
        assert [("c", event.name)] * 3 == HEARD


def test_earlier_names_of_events_work_as_methods_and_in_run_event():
    calls = []

    class EarlierNames(Callback):
        def training_start(self, state, logger):
            calls.append("training_start")

        def training_end(self, state, logger):
            calls.append("training_end")

    with make_trainer(callbacks=[EarlierNames()]) as trainer:
        for spelling in ("training_start", "TRAINING_END", Event.TRAINING_START, "fit_end"):
            trainer.engine.run_event(spelling)
        trainer.fit()
    assert calls == ["training_start", "training_end"] * 3


def test_an_unknown_event_is_an_error_with_a_suggestion():
    message = "unknown event 'epoch_strat'; did you mean 'epoch_start'"
    with make_trainer() as trainer, pytest.raises(ValueError, match=message):
        trainer.engine.run_event("epoch_strat")


def test_only_overridden_methods_are_listeners():
    class Overrides(Callback):
        def batch_end(self, state, logger): ...

    class Inherits(Overrides): ...

    overrides, inherits, nothing = Overrides(), Inherits(), Callback()
    with make_trainer(callbacks=[overrides, inherits, nothing]) as trainer:
        assert trainer.engine.listeners("batch_end") == [overrides, inherits]
        for event in Event:
            if event is not Event.BATCH_END:
                assert not {overrides, inherits, nothing} & {*trainer.engine.listeners(event)}


def test_an_override_of_run_event_gets_all_events_and_decides_whether_methods_are_called():
    class Both(Callback):
        def __init__(self, forward):
            self.forward, self.events, self.ends = forward, [], 0

        def run_event(self, event, state, logger):
            self.events.append(event)
            if self.forward:
                super().run_event(event, state, logger)

        def batch_end(self, state, logger):
            self.ends += 1

    silent, forwarding = Both(False), Both(True)
    with make_trainer(callbacks=[silent, forwarding]) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])
    assert {*silent.events} == {*Event} and silent.events == forwarding.events
    assert silent.events.count(Event.BATCH_END) == 6
    assert (silent.ends, forwarding.ends) == (0, 6)
    assert all(type(event) is Event for event in silent.events)


def test_an_override_of_run_event_can_forward_to_methods_with_earlier_names():
    class Both(Callback):
        def run_event(self, event, state, logger):
            super().run_event(event, state, logger)

        def training_start(self, state, logger):
            HEARD.append(("both", "training_start"))

    with make_trainer(callbacks=[Both()]) as trainer:
        trainer.fit()
    assert HEARD == [("both", "training_start")]


class Plain(Callback):
    def batch_end(self, state, logger): ...


def calls_to_make_a_trainer(number: int) -> int:
    """Return how many Python functions are called to make a Trainer with a number of callbacks."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    callbacks = [Plain() for _ in range(number)]
    sys.setprofile(profile)
    try:
        trainer = make_trainer(callbacks=callbacks)
    finally:
        sys.setprofile(None)
    trainer.close()
    return count


def test_the_calls_to_make_a_trainer_grow_linearly_with_its_callbacks():
    none, few, many = map(calls_to_make_a_trainer, (0, 20, 200))
    assert many - none < 11 * (few - none)
