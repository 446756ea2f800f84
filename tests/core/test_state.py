"""The state: its fields, elapsed duration, timestamps, current dataloader, and metric values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer as make_trainer
from torch import nn

from runner import Callback, ClassificationModel, Evaluator, Event, Interval, Time, Timestamp


def test_an_unknown_field_can_neither_be_read_nor_set():
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
    fractions: list[float] = []

    class Elapsed(Callback):
        def batch_end(self, state, logger):
            elapsed = state.get_elapsed_duration()
            assert isinstance(elapsed, Time) and elapsed.unit == "dur"
            fractions.append(float(elapsed.value))

    with make_trainer(Elapsed(), max_duration=duration) as trainer:
        assert trainer.state.get_elapsed_duration() == "0dur"
        trainer.fit()
        assert trainer.state.get_elapsed_duration() == "1dur"
    assert fractions[: len(expected)] == pytest.approx(expected)


def test_step_time_keeps_the_previous_timestamp_for_intervals():
    with make_trainer() as trainer:
        state = trainer.state
        state.step_time(Timestamp(batch=3))
        state.step_time(Timestamp(batch=5))
        assert (state.previous_timestamp.batch, state.timestamp.batch) == (3, 5)
        assert state.is_due(Interval("2ba")) and state.is_due(Interval("5ba")) and not state.is_due(Interval("6ba"))
        assert not state.is_due(Interval(0))


def test_label_and_length_at_each_event_are_those_of_the_dataloader_in_use():
    labels: dict[str, set[tuple[Any, ...]]] = {}
    loaders: dict[tuple[Any, ...], Any] = {}

    class Labels(Callback):
        def run_event(self, event, state, logger):
            label = (state.dataloader_label, state.dataloader_len)
            labels.setdefault(event.value, set()).add(label)
            assert loaders.setdefault(label, state.dataloader) is state.dataloader
            if event == "eval_batch_end":
                assert state.eval_timestamp.batch >= 1

    evaluators = [Evaluator("short", [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))], eval_interval="1ba")]
    with make_trainer(Labels(), eval_dataloader=evaluators, max_duration="5ba") as trainer:
        assert trainer.state.dataloader_label is None
        trainer.fit()
        trainer.eval()
        trainer.predict([(torch.ones(2, 3),)] * 3)
        state = trainer.state
    in_training = {event for event, values in labels.items() if values == {("train", 4)}}
    events = [event.value for event in Event]
    fit = events[events.index("fit_start") : events.index("fit_end") + 1]
    assert {"fit_start", "epoch_start", "epoch_end", "fit_end"} <= in_training and in_training >= {*fit} & {*labels}
    assert in_training >= {"eval_before_all", "eval_after_all", "eval_standalone_start", "eval_standalone_end"}
    assert labels["eval_start"] == labels["eval_end"] == {("short", 1)}
    assert labels["predict_batch_end"] == labels["predict_end"] == {("predict", 3)}
    assert (state.eval_timestamp.batch, state.eval_timestamp.sample) == (1, 2)
    assert (state.predict_timestamp.batch, state.predict_timestamp.sample) == (3, 6)


def test_each_evaluator_has_metrics_of_its_own_under_its_label():
    inputs, zeros = torch.ones(2, 3), torch.zeros(2, dtype=torch.long)
    evaluators = [Evaluator("zeros", [(inputs, zeros)]), Evaluator("ones", [(inputs, zeros + 1)])]
    linear = nn.Linear(3, 2)
    linear.weight.data, linear.bias.data = torch.zeros(2, 3), torch.tensor([5.0, -5.0])
    model = ClassificationModel(linear, 2)
    with make_trainer(model=model, eval_dataloader=evaluators) as trainer:
        values = trainer.eval()
    accuracies = {label: float(metrics["MulticlassAccuracy"]) for label, metrics in values.items()}
    assert accuracies == {"zeros": 1.0, "ones": 0.0}
    assert trainer.state.eval_metric_values == values == {label: trainer.state.metric_values[label] for label in values}
    assert trainer.state.eval_metrics["zeros"] is not trainer.state.eval_metrics["ones"]
    assert "train" in trainer.state.metric_values
