from __future__ import annotations

import resource
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import nn

from runner import Callback, ClassificationModel, Record, Timestamp, Trainer, save_checkpoint
from runner.callbacks import InMemoryLogger, LearningCurves, LRMonitor
from runner.callbacks.learning_curves import MAX_POINTS, draw
from runner.data import TensorLoader


def make_trainer(tmp_path, *callbacks, **arguments: Any) -> Trainer:
    inputs, targets = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Linear(3, 2), 2),
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "eval_dataloader": TensorLoader(inputs, targets, batch_size=12, shuffle=False),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "10ep",
        "callbacks": list(callbacks),
        "device": "cpu",
        "run_dir": tmp_path / "run",
    }
    return Trainer(**(defaults | arguments))


def lines(curves: LearningCurves) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """What is drawn, by panel and label."""
    drawn = {}
    for axes in draw(curves._curves).axes:
        labelled = (line for line in axes.get_lines() if not line.get_label().startswith("_"))
        drawn[axes.get_title()] = {one.get_label(): (list(one.get_xdata()), list(one.get_ydata())) for one in labelled}
    return drawn


def test_the_picture_is_in_the_runs_folder_and_logged(tmp_path):
    memory = InMemoryLogger()
    with make_trainer(tmp_path, LRMonitor(), LearningCurves(), memory) as trainer:
        trainer.fit()
    path = tmp_path / "run" / "learning_curves.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[:2] == (340, 1350)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    assert [(str(where), folder) for where, folder in memory.artifacts] == [(str(path), "plots")]


def test_on_a_full_disk_there_is_no_picture_and_the_run_has_trained(tmp_path, caplog):
    class FullDisk(Callback):
        def epoch_end(self, state, logger):
            if state.timestamp.epoch == 10:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with make_trainer(tmp_path, FullDisk(), LearningCurves()) as trainer:
            trainer.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (record,) = caplog.records
    assert record.getMessage().startswith("learning_curves cannot write ([Errno 27] ")
    assert list((tmp_path / "run").iterdir()) == []


def test_the_curves_are_what_was_logged(tmp_path):
    memory, curves = InMemoryLogger(), LearningCurves()
    with make_trainer(tmp_path, LRMonitor(), curves, memory) as trainer:
        trainer.fit()
    drawn = lines(curves)
    assert list(drawn) == ["loss", "metrics", "learning rate"]
    assert list(drawn["loss"]) == ["train", "eval"]
    for panel, label, key in (
        ("loss", "eval", "loss/eval/total"),
        ("metrics", "train/MulticlassAccuracy", "metrics/train/MulticlassAccuracy"),
        ("metrics", "eval/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy"),
        ("learning rate", "lr-SGD/group0", "lr-SGD/group0"),
    ):
        steps, values = memory.get_timeseries(key)
        assert drawn[panel][label] == (steps, values)
    steps, values = memory.get_timeseries("loss/train/total")
    assert drawn["loss"]["train"][0] == steps
    smooth = drawn["loss"]["train"][1]
    assert min(values) <= min(smooth)
    assert max(smooth) <= max(values)
    assert np.abs(np.diff(smooth)).sum() < np.abs(np.diff(values)).sum()


def test_many_points_are_averaged_into_few():
    curves = LearningCurves()
    steps = range(1, 40 * MAX_POINTS + 1)
    for step in steps:
        curves.log_records([Record({"loss/a/total": 2.0 * step, "time/batch": step}, step, Timestamp(), 0.0)])
    drawn_steps, drawn_values = lines(curves)["loss"]["a"]
    assert MAX_POINTS <= len(drawn_steps) < 2 * MAX_POINTS
    assert np.mean(drawn_steps) == np.mean(steps)  # every step is in exactly one mean
    assert drawn_values == [2 * step for step in drawn_steps]
    assert list(curves.state_dict()) == ["loss/a/total"]


def test_of_many_curves_a_panel_shows_as_many_as_its_legend_has_room_for():
    curves = LearningCurves()
    metrics = {f"metrics/train/PerClass/{number}": 0.1 for number in range(1000)} | {"metrics/train/Accuracy": 0.5}
    curves.log_records([Record(metrics, step, Timestamp(), 0.0) for step in range(1, 4)])
    ((title, drawn),) = lines(curves).items()
    assert title == "metrics, 12 of 1,001"
    assert [*drawn][:2] == ["train/Accuracy", "train/PerClass/0"]
    assert len(drawn) == 12


def test_a_resumed_run_draws_the_whole_of_it(tmp_path):
    whole, first, second = LearningCurves(), LearningCurves(), LearningCurves()
    torch.manual_seed(0)
    weights = nn.Linear(3, 2).state_dict()

    def model() -> ClassificationModel:
        module = nn.Linear(3, 2)
        module.load_state_dict(weights)
        return ClassificationModel(module, 2)

    with make_trainer(tmp_path, whole, model=model()) as trainer:
        trainer.fit()
    with make_trainer(tmp_path, first, model=model()) as trainer:
        trainer.fit("7ba")
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    with make_trainer(tmp_path, second, model=model(), resume_path=tmp_path / "checkpoint") as trainer:
        trainer.fit()
    drawn, expected = lines(second), lines(whole)
    # The first part ended with an evaluation that the whole run has not.
    steps, values = drawn["loss"]["eval"]
    extra = steps.index(7)
    assert (steps[:extra] + steps[extra + 1 :], values[:extra] + values[extra + 1 :]) == expected["loss"]["eval"]
    assert drawn["loss"]["train"] == expected["loss"]["train"]


@pytest.mark.parametrize("filename", ["curves", "a/curves.png", "curves.jpeg"])
def test_arguments_are_checked(filename: str):
    with pytest.raises(ValueError, match=f"filename='{filename}'"):
        LearningCurves(filename)
