"""A hook that asks for a later call is not called until then; all others still are."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_runs import make_trainer  # of two epochs with three batches each

from runner import Callback, Interval, NextCall
from runner.callbacks._resting import NEVER, until_due


class Rests(Callback):
    """Records the batches at which it is called, and asks for one later call after another."""

    def __init__(self, *calls: float | None, then: float | None = None):
        self.calls, self.then = [*calls], then
        self.heard: list[int] = []

    def batch_end(self, state, logger):
        self.heard.append(state.timestamp.batch)
        call = self.calls.pop(0) if self.calls else self.then
        return None if call is None else NextCall(call)


@pytest.mark.parametrize(
    ("calls", "heard"),
    [
        ([], [1, 2, 3, 4, 5, 6]),
        ([4], [1, 4, 5, 6]),
        ([3, 5], [1, 3, 5, 6]),
        ([None, 6], [1, 2, 6]),
        ([0, 1, 2], [1, 2, 3, 4, 5, 6]),  # which is over
        ([2.5], [1, 3, 4, 5, 6]),
        ([math.inf], [1]),
        ([7], [1]),
    ],
    ids=str,
)
def test_a_hook_is_called_again_when_it_asked_to_be(calls: list[float | None], heard: list[int]):
    one = Rests(*calls)
    with make_trainer(callbacks=[one]) as trainer:
        trainer.fit()
    assert one.heard == heard


def test_those_awake_keep_their_order():
    heard: list[tuple[int, int]] = []

    class Notes(Rests):
        def batch_end(self, state, logger):
            heard.append((state.timestamp.batch, numbers.index(self)))
            return super().batch_end(state, logger)

    numbers = [Notes(3, 6), Notes(), Notes(2, 3, math.inf), Notes(math.inf)]
    with make_trainer(callbacks=numbers) as trainer:
        trainer.fit()
    at = {batch: [number for now, number in heard if now == batch] for batch in range(1, 7)}
    assert at == {1: [0, 1, 2, 3], 2: [1, 2], 3: [0, 1, 2], 4: [1], 5: [1], 6: [0, 1]}


def test_other_events_are_heard_meanwhile():
    class Both(Rests):
        starts = 0

        def batch_start(self, state, logger):
            self.starts += 1

    one = Both(then=math.inf)
    with make_trainer(callbacks=[one]) as trainer:
        trainer.fit()
    assert one.starts == 6 and one.heard == [1]


def test_a_call_of_fit_wakes_all():
    one = Rests(then=math.inf)
    with make_trainer(callbacks=[one]) as trainer:
        trainer.fit(duration="2ba")
        trainer.fit(duration="2ba")
        trainer.fit(duration="2ba", reset_time=True)
    assert one.heard == [1, 3, 1]


def test_an_event_from_outside_is_heard_by_all():
    one = Rests(then=math.inf)
    with make_trainer(callbacks=[one]) as trainer:
        trainer.fit(duration="2ba")
        trainer.engine.run_event("batch_end")
    assert one.heard == [1, 2]


def test_what_else_a_hook_returns_is_ignored():
    class Returns(Rests):
        def batch_end(self, state, logger) -> Any:
            super().batch_end(state, logger)
            return (math.inf,)  # equal to a NextCall, but none

    one = Returns()
    with make_trainer(callbacks=[one]) as trainer:
        trainer.fit()
    assert one.heard == [1, 2, 3, 4, 5, 6]


def test_the_error_of_one_that_was_woken_names_it():
    class Fails(Rests):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 4:
                raise RuntimeError("failed")
            return super().batch_end(state, logger)

    with pytest.raises(RuntimeError, match="failed") as caught, make_trainer(callbacks=[Rests(), Fails(4)]) as trainer:
        trainer.fit()
    assert any("raised by 'fails' at BATCH_END, in epoch 2, after 4 batches" in one for one in caught.value.__notes__)


@pytest.mark.parametrize("interval", ["1ba", "2ba", "3ba", "5ba", "1ep", "0ep", "2sp", "0.5dur", "0.1dur", "0sec"])
def test_resting_until_an_interval_is_due_misses_nothing(interval: str):
    class Due(Callback):
        def __init__(self, rests: bool):
            self.rests = rests
            self.calls, self.due = 0, []

        def batch_end(self, state, logger):
            self.calls += 1
            if state.is_due(given):
                self.due.append(tuple(state.timestamp[:3]))
            return until_due(given, state) if self.rests else None

        epoch_end = batch_end

    given = Interval(interval)
    awake, rested = Due(rests=False), Due(rests=True)
    with make_trainer(callbacks=[awake, rested]) as trainer:
        trainer.fit()
    assert rested.due == awake.due and awake.calls == 8
    assert rested.calls < 8 or given.time.unit in ("sp", "dur") or interval == "1ba"
    assert NEVER.batch == math.inf
