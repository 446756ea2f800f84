from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted_model import Scripted

from runner import Callback, Trainer, save_checkpoint
from runner.callbacks import EarlyStopper
from runner.data import TensorLoader

NAN = float("nan")


def make_trainer(script: Sequence[float], stopper: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": Scripted(script),
        "train_dataloader": TensorLoader(torch.ones(4), batch_size=2, shuffle=False),
        "eval_dataloader": TensorLoader(torch.ones(1), batch_size=1, shuffle=False),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "12ep",
        "callbacks": [stopper],
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def epochs_run(script: Sequence[float], stopper: Callback, **arguments: Any) -> int:
    with make_trainer(script, stopper, **arguments) as trainer:
        trainer.fit()
    return trainer.state.timestamp.epoch


@pytest.mark.parametrize("best", [1, 3])
@pytest.mark.parametrize("patience", [0, 1, 2, 4])
def test_training_ends_one_epoch_after_the_patience(best: int, patience: int):
    script = [10.0 - epoch for epoch in range(1, best + 1)] + [10.0] * 12
    assert epochs_run(script, EarlyStopper("loss", patience=f"{patience}ep")) == best + patience + 1


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ([5, 4, 3, 2, 2, 2, 2], {}, 6),
        ([5, 4.5, 4.4, 4.3, 4.2], {"min_delta": 0.3}, 4),
        ([5, 4.5, 4.4, 4.3, 4.2], {"min_delta": -0.3}, 4),
        ([1, 2, 3, 3, 3, 3], {"comp": "gt"}, 5),
        ([NAN, NAN, 3, NAN, NAN, NAN], {}, 2),
        ([3, NAN, 2, NAN, NAN, NAN], {}, 5),
        ([5, 5, 5, 5], {"patience": "3ba"}, 3),
        ([5, 5, 5, 5], {"patience": "4ba"}, 4),
        ([5, 5, 5, 5], {"patience": "7sp"}, 3),
        # The metric is minus the loss, so more is better.
        ([5, 4, 3, 3, 3], {"monitor": "Mean"}, 5),
        ([1, 2, 3, 3, 3], {"monitor": "Mean", "comp": "lt"}, 5),
    ],
)
def test_improvements_exceed_min_delta(script: list[float], arguments: dict, expected: int):
    arguments = {"monitor": "loss"} | arguments
    assert epochs_run(script, EarlyStopper(**arguments)) == expected


def test_a_metric_of_training_is_judged_at_the_end_of_each_epoch():
    means = [1, 3, 2, 2, 2]  # two batches an epoch
    model = Scripted([], [mean + offset for mean in means for offset in (-1.0, 1.0)])
    for stopper in (EarlyStopper("Mean", "train"), EarlyStopper("train/Mean")):
        assert epochs_run([], stopper, model=copy.deepcopy(model), eval_dataloader=None) == 4


@pytest.mark.parametrize(("patience", "batches"), [("1ba", 5), ("3sp", 5), ("2ba", 6), ("5sp", 6)])
def test_a_patience_in_batches_judges_a_metric_of_training_after_each(patience: str, batches: int):
    seen = [1, 3, 9, 5, 7, 6, 6, 8]  # so the metric so far, of two batches an epoch, is 1, 2, 9, 7, 7, 6.5, 6, 7
    with make_trainer(
        [], EarlyStopper("Mean", "train", patience=patience), model=Scripted([], seen), eval_dataloader=None
    ) as trainer:
        trainer.fit()
    assert trainer.state.timestamp == f"{batches}ba"


def test_an_evaluation_outside_training_does_not_count():
    stopper = EarlyStopper("loss", patience="0ep")
    with make_trainer([1.0, 9.0, 8.0, 7.0, 7.0], stopper) as trainer:
        trainer.eval()
        trainer.fit()
    assert trainer.state.timestamp.epoch == 4


def test_a_resumed_run_stops_at_the_same_batch_as_the_whole_one(tmp_path):
    script = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5]
    with make_trainer(script, EarlyStopper("loss", patience="2ep")) as first:
        first.fit(duration="3ep")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    again = make_trainer(script[3:], EarlyStopper("loss", patience="2ep"), resume_path=tmp_path / "checkpoint")
    with again as second:
        second.fit()
    assert second.state.timestamp.epoch == epochs_run(script, EarlyStopper("loss", patience="2ep")) == 5


@pytest.mark.parametrize(("patience", "epochs"), [("1ep", 4), ("5sp", 4), ("3ep", 6), ("8sp", 5)])
def test_a_run_that_stopped_early_continues_only_with_more_patience(patience: str, epochs: int, tmp_path):
    script = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5]
    with make_trainer(script, EarlyStopper("loss")) as first:
        first.fit()
        save_checkpoint(first.state, tmp_path / "checkpoint")
    assert first.state.timestamp.epoch == 4
    again = EarlyStopper("loss", patience=patience)
    with make_trainer(script[4:], again, resume_path=tmp_path / "checkpoint") as second:
        second.fit()
    assert second.state.timestamp.epoch == epochs


def test_a_resumed_run_that_is_told_to_go_on_does(tmp_path):
    script = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5]
    with make_trainer(script, EarlyStopper("loss")) as first:
        first.fit()
        save_checkpoint(first.state, tmp_path / "checkpoint")
    with make_trainer(script[4:], EarlyStopper("loss"), resume_path=tmp_path / "checkpoint") as second:
        second.fit()
        second.fit("1ep")
    assert second.state.timestamp.epoch == 5


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_two_of_them_keep_apart_what_was_best_over_a_resume(cut: int, tmp_path):
    script = [5.0, 4.0, 3.9, 3.8, 3.7, 3.6, 3.5, 3.4]

    def two() -> list[EarlyStopper]:  # the first is never content to stop, to the second little has changed since 4.0
        return [EarlyStopper("loss", patience="1ep"), EarlyStopper("loss", min_delta=0.5, patience="2ep")]

    with make_trainer(script, two()[0], callbacks=two()) as whole:
        whole.fit()
    assert whole.state.timestamp.epoch == 2 + 2 + 1
    with make_trainer(script, two()[0], callbacks=two()) as first:
        first.fit(duration=f"{cut}ep")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    arguments = {"callbacks": two(), "resume_path": tmp_path / "checkpoint"}
    with make_trainer(script[cut:], two()[0], **arguments) as second:
        second.fit()
    assert second.state.timestamp.epoch == whole.state.timestamp.epoch


@pytest.mark.parametrize(
    "arguments",
    [
        {"monitor": "Accuracy"},
        {"monitor": "loss", "dataloader_label": "test"},
    ],
)
def test_an_unknown_metric_is_an_error_that_lists_those_that_exist(arguments: dict):
    with pytest.raises(ValueError, match=r"is not a metric of this run; there are .*'eval/loss', 'eval/Mean'"):
        epochs_run([1.0] * 12, EarlyStopper(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"comp": "less"},
        {"patience": "10m"},
        {"patience": "0.5dur"},
        {"min_delta": float("nan")},
        {"min_delta": float("inf")},
        {"min_delta": "0.1"},
    ],
)
def test_arguments_are_checked(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        EarlyStopper("loss", **arguments)


def test_a_metric_that_was_never_a_number_is_said(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "runner")
    assert epochs_run([float("nan")] * 12, EarlyStopper("loss")) == 2
    assert caplog.messages == ["stopped early: eval/loss has been NaN so far"]


def test_a_metric_that_nobody_measures_is_said(caplog: pytest.LogCaptureFixture):
    assert epochs_run([], EarlyStopper("loss"), eval_interval=0) == 12
    (message,) = caplog.messages
    assert message == "monitor='loss' never has a value in training: 'eval' is not evaluated there (eval_interval=0)"
