"""Who hears which event, in which order, and under which names."""

from __future__ import annotations

import sys

import pytest
import torch
from engine_runs import HEARD, A, C, L, make_trainer, names_at
from torch import nn

from runner import Algorithm, Callback, ClassificationModel, Event


def test_who_acts_first_at_every_event_of_a_run():
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
            heard = names_at(event.name)
            assert heard and heard == expected * (len(heard) // 6), event
            named = [getattr(one, "name", None) for one in trainer.engine.listeners(event)]
            assert [name for name in named if name] == expected


def test_closing_events_nest_what_algorithms_wrap_in_a_run():
    with make_trainer([A("outer"), A("inner")], max_duration="1ba", eval_dataloader=None) as trainer:
        trainer.fit()
    inside = [(name, event) for name, event in HEARD if "FORWARD" in event]
    assert inside == [
        ("outer", "BEFORE_FORWARD"),
        ("inner", "BEFORE_FORWARD"),
        ("inner", "AFTER_FORWARD"),
        ("outer", "AFTER_FORWARD"),
    ]
    assert [name for name, event in HEARD if event == "AFTER_DATALOADER"] == ["outer", "inner"]
    assert [name for name, event in HEARD if event == "AFTER_LOAD"] == ["outer", "inner"]


def test_construction_fires_three_events_with_or_without_a_checkpoint():
    with make_trainer(callbacks=C("c")):
        assert HEARD == [("c", "INIT"), ("c", "BEFORE_LOAD"), ("c", "AFTER_LOAD")]


def test_optimizers_come_after_init_and_schedulers_with_them():
    class Looks(Callback):
        def init(self, state, logger):
            assert state.optimizers == [] and state.schedulers == []
            assert next(state.unwrapped_model.parameters()).device == state.device

        def before_load(self, state, logger):
            assert len(state.optimizers) == len(state.schedulers) == 1

    class Widens(Algorithm):
        def init(self, state, logger):
            state.unwrapped_model.module = nn.Linear(3, 2, bias=False)

    stepped = {"schedulers": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with make_trainer([Widens()], [Looks()], **stepped) as trainer:
        (group,) = trainer.state.optimizers[0].param_groups
        assert [one.shape for one in group["params"]] == [(2, 3)]
        trainer.fit()


@pytest.mark.parametrize("event", list(Event))
def test_events_fire_from_outside_in_any_spelling(event: Event):
    model = ClassificationModel(nn.Linear(3, 2), 2)
    model.metrics = lambda train: {}  # type: ignore[method-assign]
    with make_trainer(callbacks=[C("c")], model=model) as trainer:
        HEARD.clear()
        for spelling in (event, event.value, event.name):
            trainer.engine.run_event(spelling)
        assert [("c", event.name)] * 3 == HEARD


def test_aliases_are_methods_and_strings():
    heard = []

    class Early(Callback):
        def training_start(self, state, logger):
            heard.append("training_start")

        def training_end(self, state, logger):
            heard.append("training_end")

    with make_trainer(callbacks=[Early()]) as trainer:
        for spelling in ("training_start", "TRAINING_END", Event.TRAINING_START, "fit_end"):
            trainer.engine.run_event(spelling)
        trainer.fit()
    assert heard == [
        "training_start",
        "training_end",
        "training_start",
        "training_end",
        "training_start",
        "training_end",
    ]


def test_an_unknown_event_is_an_error_with_the_nearest():
    with (
        make_trainer() as trainer,
        pytest.raises(ValueError, match="unknown event 'epoch_strat'; did you mean 'epoch_start'"),
    ):
        trainer.engine.run_event("epoch_strat")


def test_only_overridden_methods_are_in_the_table():
    class One(Callback):
        def batch_end(self, state, logger): ...

    class Inherits(One): ...

    one, inherits, nothing = One(), Inherits(), Callback()
    with make_trainer(callbacks=[one, inherits, nothing]) as trainer:
        assert trainer.engine.listeners("batch_end") == [one, inherits]
        for event in Event:
            if event is not Event.BATCH_END:
                assert not {one, inherits, nothing} & {*trainer.engine.listeners(event)}


def test_who_overrides_run_event_hears_all_and_its_methods_only_through_itself():
    class Both(Callback):
        def __init__(self, forward):
            self.forward, self.events, self.ends = forward, [], 0

        def run_event(self, event, state, logger):
            self.events.append(event)
            if self.forward:
                super().run_event(event, state, logger)

        def batch_end(self, state, logger):
            self.ends += 1

    silent, passing = Both(False), Both(True)
    with make_trainer(callbacks=[silent, passing]) as trainer:
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)])
    assert {*silent.events} == {*Event} and silent.events == passing.events
    assert silent.events.count(Event.BATCH_END) == 6
    assert (silent.ends, passing.ends) == (0, 6)
    assert all(type(event) is Event for event in silent.events)


def test_a_run_event_override_may_pass_on_to_methods_under_the_earliest_names():
    class Both(Callback):
        def run_event(self, event, state, logger):
            super().run_event(event, state, logger)

        def training_start(self, state, logger):
            HEARD.append(("both", "training_start"))

    with make_trainer(callbacks=[Both()]) as trainer:
        trainer.fit()
    assert HEARD == [("both", "training_start")]


def calls_to_make_a_trainer(callbacks: int) -> int:
    """Calls of Python functions."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    watching = [Counts() for _ in range(callbacks)]
    sys.setprofile(note)
    try:
        trainer = make_trainer(callbacks=watching)
    finally:
        sys.setprofile(None)
    trainer.close()
    return count


class Counts(Callback):
    def batch_end(self, state, logger): ...


def test_making_a_trainer_takes_a_time_in_proportion_to_its_callbacks():
    none, few, many = map(calls_to_make_a_trainer, (0, 20, 200))
    assert many - none < 11 * (few - none)
