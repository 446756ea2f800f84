from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer as make_trainer
from torch import nn

from runner import Callback, ClassificationModel, Evaluator, Event, Interval, Time, Timestamp


def test_a_field_that_does_not_exist_can_be_neither_read_nor_written():
    with make_trainer() as trainer:
        for name in ("bacth", "timestep"):
            with pytest.raises(AttributeError, match=name):
                getattr(trainer.state, name)
            with pytest.raises(AttributeError, match=name):
                setattr(trainer.state, name, 1)


@pytest.mark.parametrize(
    ("duration", "expected"),
    [("8ba", [1 / 8, 2 / 8, 3 / 8, 4 / 8]), ("2ep", [1 / 8, 2 / 8, 3 / 8, 4 / 8]), ("5sp", [2 / 5, 4 / 5, 1.0])],
)
def test_the_elapsed_duration_is_a_fraction_and_at_most_one(duration: str, expected: list[float]):
    seen: list[float] = []

    class Looks(Callback):
        def batch_end(self, state, logger):
            elapsed = state.get_elapsed_duration()
            assert isinstance(elapsed, Time) and elapsed.unit == "dur"
            seen.append(float(elapsed.value))

    with make_trainer(Looks(), max_duration=duration) as trainer:
        assert trainer.state.get_elapsed_duration() == "0dur"
        trainer.fit()
        assert trainer.state.get_elapsed_duration() == "1dur"
    assert seen[: len(expected)] == pytest.approx(expected)


def test_a_step_of_time_remembers_the_one_before():
    with make_trainer() as trainer:
        state = trainer.state
        state.step_time(Timestamp(batch=3))
        state.step_time(Timestamp(batch=5))
        assert (state.previous_timestamp.batch, state.timestamp.batch) == (3, 5)
        assert state.is_due(Interval("2ba")) and state.is_due(Interval("5ba")) and not state.is_due(Interval("6ba"))
        assert not state.is_due(Interval(0))


def test_labels_lengths_and_timestamps_of_what_is_read_now():
    seen: dict[str, set[tuple[Any, ...]]] = {}
    loaders: dict[tuple[Any, ...], Any] = {}

    class Looks(Callback):
        def run_event(self, event, state, logger):
            one = (state.dataloader_label, state.dataloader_len)
            seen.setdefault(event.value, set()).add(one)
            assert loaders.setdefault(one, state.dataloader) is state.dataloader
            if event == "eval_batch_end":
                assert state.eval_timestamp.batch >= 1

    evaluators = [Evaluator("short", [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))], eval_interval="1ba")]
    with make_trainer(Looks(), eval_dataloader=evaluators, max_duration="5ba") as trainer:
        assert trainer.state.dataloader_label is None
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)] * 3)
        state = trainer.state
    of_training = {event for event, labels in seen.items() if labels == {("train", 4)}}
    events = [one.value for one in Event]
    fit = events[events.index("fit_start") : events.index("fit_end") + 1]
    assert {"fit_start", "epoch_start", "epoch_end", "fit_end"} <= of_training and of_training >= {*fit} & {*seen}
    assert of_training >= {"eval_before_all", "eval_after_all", "eval_standalone_start", "eval_standalone_end"}
    assert seen["eval_start"] == seen["eval_end"] == {("short", 1)}
    assert seen["predict_batch_end"] == seen["predict_end"] == {("predict", 3)}
    assert (state.eval_timestamp.batch, state.eval_timestamp.sample) == (1, 2)
    assert (state.predict_timestamp.batch, state.predict_timestamp.sample) == (3, 6)


def test_metric_values_are_by_label_so_that_evaluators_never_collide():
    inputs, zeros = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    evaluators = [Evaluator("zeros", [(inputs, zeros)]), Evaluator("ones", [(inputs, zeros + 1)])]
    linear = nn.Linear(3, 2)
    linear.weight.data, linear.bias.data = torch.zeros(2, 3), torch.tensor([5.0, -5.0])
    model = ClassificationModel(linear, 2)
    with make_trainer(model=model, eval_dataloader=evaluators) as trainer:
        values = trainer.eval()
    assert {label: float(one["MulticlassAccuracy"]) for label, one in values.items()} == {"zeros": 1.0, "ones": 0.0}
    assert trainer.state.eval_metric_values == values == {k: trainer.state.metric_values[k] for k in values}
    assert trainer.state.eval_metrics["zeros"] is not trainer.state.eval_metrics["ones"]
    assert "train" in trainer.state.metric_values
