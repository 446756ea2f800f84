"""When evaluations run during training, of which evaluators, and in which order."""

from __future__ import annotations

import time
from typing import Any

import pytest
from loop_runs import Trace, fit_events, make_data, make_trainer

from runner import Callback, Evaluator


@pytest.mark.parametrize(
    ("interval", "duration", "at_batch", "at_epoch", "final"),
    [
        ("1ep", "2ep", [], [1, 2], False),
        ("1ep", "6ba", [], [1], True),
        ("1ep", "8ba", [], [1, 2], False),
        ("2ba", "2ep", [2, 4, 6, 8], [], False),
        ("3ba", "2ep", [3, 6], [], True),
        ("100ba", "5ba", [], [], True),
        ("6sp", "2ep", [3, 6], [], True),
        ("12tok", "4ba", [2, 4], [], False),
        ("0.25dur", "8ba", [2, 4, 6, 8], [], False),
        ("0.25dur", "10ba", [3, 5, 8, 10], [], False),
        ("0.3dur", "10ba", [3, 6, 9], [], True),
        ("1dur", "6ba", [6], [], False),
        ("1dur", "2ep", [], [2], False),
        (2, "2ep", [], [2], False),
        (0, "2ep", [], [], False),
    ],
)
@pytest.mark.parametrize("of", ["trainer", "evaluator"])
def test_when_evaluations_run(interval, duration: str, at_batch: list, at_epoch: list, final: bool, of: str):
    trace = Trace()
    if of == "trainer":
        arguments: dict[str, Any] = {"eval_interval": interval, "eval_dataloader": make_data(1)}
    else:
        arguments = {"eval_interval": "1ba", "eval_dataloader": Evaluator("eval", make_data(1), None, interval)}
    with make_trainer(trace, max_duration=duration, **arguments) as trainer:
        trace.take()
        trainer.fit()
    batches = {"ba": int(duration[:-2]), "ep": 4 * int(duration[:-2])}[duration[-2:]]
    assert trace.events == fit_events(
        batches,
        finds_end=duration.endswith("ep"),
        at_batch={batch: ["eval"] for batch in at_batch},
        at_epoch={epoch: ["eval"] for epoch in at_epoch},
        final=["eval"] if final else [],
    )


def test_two_evaluators_run_in_their_order_each_at_its_interval():
    trace = Trace()
    evaluators = [Evaluator("first", make_data(1), eval_interval="3ba"), Evaluator("second", make_data(1))]
    with make_trainer(trace, eval_dataloader=evaluators, eval_interval="2ba", max_duration="7ba") as trainer:
        trace.take()
        trainer.fit()
    at_batch = {2: ["second"], 3: ["first"], 4: ["second"], 6: ["first", "second"]}
    assert trace.events == fit_events(7, at_batch=at_batch, final=["first", "second"])


def test_the_final_evaluation_is_of_those_that_have_not_run_at_this_batch():
    trace = Trace()
    evaluators = [
        Evaluator("due", make_data(1), eval_interval="2ba"),
        Evaluator("owed", make_data(1), eval_interval="1ep"),
        Evaluator("off", make_data(1), eval_interval=0),
    ]
    with make_trainer(trace, eval_dataloader=evaluators, max_duration="2ba") as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(2, at_batch={2: ["due"]}, final=["owed"])


@pytest.mark.usefixtures("steady")
def test_an_interval_in_seconds():
    class Slow(Callback):
        def before_forward(self, state, logger):
            if state.timestamp.batch in (2, 5):
                time.sleep(0.6)

    trace = Trace()
    evaluator = Evaluator("eval", make_data(1), eval_interval="0.5s")
    with make_trainer(trace, Slow(), eval_dataloader=evaluator, max_duration="8ba") as trainer:
        trainer.fit()
    evaluated = [batch for _, batch, _ in trace.at("EVAL_START eval")]
    assert evaluated == [3, 6, 8]


def test_the_last_evaluation_of_one_trainer_is_not_taken_for_that_of_the_next():
    evaluator = Evaluator("eval", make_data(1), eval_interval="100ba")
    for _ in range(2):
        trace = Trace()
        with make_trainer(trace, eval_dataloader=evaluator, max_duration="3ba") as trainer:
            trainer.fit()
        assert trace.at("EVAL_START eval") == [(0, 3, 3)]
