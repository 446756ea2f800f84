"""When evaluations run during training, and which evaluators take part in which order."""

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
@pytest.mark.parametrize("owner", ["trainer", "evaluator"])
def test_evaluations_run_at_their_interval_and_at_the_end(
    interval, duration: str, at_batch: list, at_epoch: list, final: bool, owner: str
):
    trace = Trace()
    if owner == "trainer":
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


def test_evaluators_run_at_their_own_intervals_in_the_order_of_the_list():
    trace = Trace()
    evaluators = [Evaluator("first", make_data(1), eval_interval="3ba"), Evaluator("second", make_data(1))]
    with make_trainer(trace, eval_dataloader=evaluators, eval_interval="2ba", max_duration="7ba") as trainer:
        trace.take()
        trainer.fit()
    at_batch = {2: ["second"], 3: ["first"], 4: ["second"], 6: ["first", "second"]}
    assert trace.events == fit_events(7, at_batch=at_batch, final=["first", "second"])


def test_the_final_evaluation_leaves_out_evaluators_that_have_just_run():
    trace = Trace()
    evaluators = [
        Evaluator("batches", make_data(1), eval_interval="2ba"),
        Evaluator("epochs", make_data(1), eval_interval="1ep"),
        Evaluator("off", make_data(1), eval_interval=0),
    ]
    with make_trainer(trace, eval_dataloader=evaluators, max_duration="2ba") as trainer:
        trace.take()
        trainer.fit()
    assert trace.events == fit_events(2, at_batch={2: ["batches"]}, final=["epochs"])


@pytest.mark.usefixtures("steady")
def test_an_evaluation_follows_the_batch_in_which_an_interval_of_seconds_ends():
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


def test_an_evaluator_of_an_earlier_trainer_still_runs_at_the_end_of_the_next():
    evaluator = Evaluator("eval", make_data(1), eval_interval="100ba")
    for _ in range(2):
        trace = Trace()
        with make_trainer(trace, eval_dataloader=evaluator, max_duration="3ba") as trainer:
            trainer.fit()
        assert trace.at("EVAL_START eval") == [(0, 3, 3)]
