from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_model import Scripted
from tiny_runs import tiny_trainer

from runner import Callback, Trainer, save_checkpoint
from runner.callbacks import EarlyStopper
from runner.data import TensorLoader

NAN = float("nan")
BEST_IN_EPOCH_2 = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5, 4.5]


def make_trainer(script: Sequence[float], *stoppers: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": Scripted(script),
        "train_dataloader": TensorLoader(torch.ones(4), batch_size=2, shuffle=False),
        "eval_dataloader": TensorLoader(torch.ones(1), batch_size=1, shuffle=False),
        "max_duration": "12ep",
    }
    return tiny_trainer(*stoppers, **(defaults | arguments))


def trained_epochs(script: Sequence[float], *stoppers: Callback, **arguments: Any) -> int:
    """Train a run, and return the number of its epochs."""
    with make_trainer(script, *stoppers, **arguments) as trainer:
        trainer.fit()
    return trainer.state.timestamp.epoch


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A checkpoint of a run that stopped after four epochs, the second of which was the best."""
    with make_trainer(BEST_IN_EPOCH_2, EarlyStopper("loss")) as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    assert trainer.state.timestamp.epoch == 4
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("best", [1, 3])
@pytest.mark.parametrize("patience", [0, 1, 2, 4])
def test_training_ends_one_epoch_after_the_patience(best: int, patience: int):
    script = [10.0 - epoch for epoch in range(1, best + 1)] + [10.0] * 12
    assert trained_epochs(script, EarlyStopper("loss", patience=f"{patience}ep")) == best + patience + 1


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
def test_min_delta_and_direction_define_an_improvement(script: list[float], arguments: dict, expected: int):
    arguments = {"monitor": "loss"} | arguments
    assert trained_epochs(script, EarlyStopper(**arguments)) == expected


def test_a_training_metric_is_checked_at_the_end_of_each_epoch():
    means = [1, 3, 2, 2, 2]  # two batches an epoch
    model = Scripted([], [mean + offset for mean in means for offset in (-1.0, 1.0)])
    for stopper in (EarlyStopper("Mean", "train"), EarlyStopper("train/Mean")):
        assert trained_epochs([], stopper, model=copy.deepcopy(model), eval_dataloader=None) == 4


@pytest.mark.parametrize(("patience", "batches"), [("1ba", 5), ("3sp", 5), ("2ba", 6), ("5sp", 6)])
def test_with_patience_in_batches_a_training_metric_is_checked_after_each_batch(patience: str, batches: int):
    values = [1, 3, 9, 5, 7, 6, 6, 8]  # with two batches an epoch, the running mean is 1, 2, 9, 7, 7, 6.5, 6, 7
    stopper = EarlyStopper("Mean", "train", patience=patience)
    with make_trainer([], stopper, model=Scripted([], values), eval_dataloader=None) as trainer:
        trainer.fit()
    assert trainer.state.timestamp == f"{batches}ba"


def test_an_evaluation_outside_training_does_not_count():
    stopper = EarlyStopper("loss", patience="0ep")
    with make_trainer([1.0, 9.0, 8.0, 7.0, 7.0], stopper) as trainer:
        trainer.eval()
        trainer.fit()
    assert trainer.state.timestamp.epoch == 4


def test_a_resumed_run_stops_after_the_same_epoch_as_an_uninterrupted_one(tmp_path):
    script = BEST_IN_EPOCH_2
    with make_trainer(script, EarlyStopper("loss", patience="2ep")) as first:
        first.fit(duration="3ep")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    stopper = EarlyStopper("loss", patience="2ep")
    assert trained_epochs(script[3:], stopper, resume_path=tmp_path / "checkpoint") == 5
    assert trained_epochs(script, EarlyStopper("loss", patience="2ep")) == 5


@pytest.mark.parametrize(("patience", "epochs"), [("1ep", 4), ("5sp", 4), ("3ep", 6), ("8sp", 5)])
def test_a_run_that_stopped_early_continues_only_with_more_patience(patience: str, epochs: int, stopped: Path):
    stopper = EarlyStopper("loss", patience=patience)
    assert trained_epochs(BEST_IN_EPOCH_2[4:], stopper, resume_path=stopped) == epochs


def test_a_fit_with_a_duration_continues_a_run_that_stopped_early(stopped: Path):
    with make_trainer(BEST_IN_EPOCH_2[4:], EarlyStopper("loss"), resume_path=stopped) as trainer:
        trainer.fit()
        trainer.fit("1ep")
    assert trainer.state.timestamp.epoch == 5


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_two_stoppers_have_separate_best_values_in_a_checkpoint(cut: int, tmp_path):
    script = [5.0, 4.0, 3.9, 3.8, 3.7, 3.6, 3.5, 3.4]

    def stoppers() -> list[EarlyStopper]:
        """Return a stopper that sees steady progress, and another that sees none since 4.0."""
        return [EarlyStopper("loss", patience="1ep"), EarlyStopper("loss", min_delta=0.5, patience="2ep")]

    assert trained_epochs(script, *stoppers()) == 2 + 2 + 1
    with make_trainer(script, *stoppers()) as first:
        first.fit(duration=f"{cut}ep")
        save_checkpoint(first.state, tmp_path / "checkpoint")
    assert trained_epochs(script[cut:], *stoppers(), resume_path=tmp_path / "checkpoint") == 2 + 2 + 1


@pytest.mark.parametrize("arguments", [{"monitor": "Accuracy"}, {"monitor": "loss", "dataloader_label": "test"}])
def test_the_error_for_an_unknown_metric_lists_the_metrics(arguments: dict):
    with pytest.raises(ValueError, match=r"is not a metric of this run; there are .*'eval/loss', 'eval/Mean'"):
        trained_epochs([1.0] * 12, EarlyStopper(**arguments))


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
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}="):
        EarlyStopper("loss", **arguments)


def test_a_run_stopped_because_its_metric_was_always_nan_says_so(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "runner")
    assert trained_epochs([float("nan")] * 12, EarlyStopper("loss")) == 2
    assert caplog.messages == ["stopped early: eval/loss has been NaN so far"]


def test_a_run_that_stopped_says_why_and_what_would_continue_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "runner")
    trained_epochs(BEST_IN_EPOCH_2, EarlyStopper("loss", patience="2ep"))
    (message,) = caplog.messages
    assert message == "stopped early: eval/loss has not improved on 4, reached at 2ep; to train on, raise patience=2ep"


def test_a_metric_that_is_never_evaluated_gives_a_warning(caplog: pytest.LogCaptureFixture):
    assert trained_epochs([], EarlyStopper("loss"), eval_interval=0) == 12
    (message,) = caplog.messages
    assert message == "monitor='loss' never has a value in training: 'eval' is not evaluated there (eval_interval=0)"
