"""A metric has a logged key and a shown name; monitors and objectives accept both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_trainer

from runner import Trainer
from runner.callbacks import CheckpointSaver, EarlyStopper
from runner.data import TensorLoader
from runner.records.result import Result
from runner.training.metric_choice import choose_metric, metrics_named, name_metric

METRICS = ["train/Accuracy", "eval/Accuracy", "eval/loss", "eval/F1/3", "other/loss"]


def make_trainer(folder: Path, *callbacks: Any) -> Trainer:
    inputs, targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    return tiny_trainer(
        *callbacks,
        train_dataloader=TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        eval_dataloader=TensorLoader(inputs, targets, batch_size=8, shuffle=False),
        max_duration="2ep",
        run_dir=folder / "run",
    )


def test_different_logged_keys_have_different_names():
    keys = ("loss/eval/total", "loss/eval/aux", "metrics/eval/aux", "metrics/eval/F1/class_3", "loss/mine", "mine")
    names = [("eval", "loss"), ("eval", "loss/aux"), ("eval", "aux"), ("eval", "F1/class_3"), ("", "mine"), ("", "")]
    assert [name_metric(key) for key in keys] == names


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("eval/loss", ["eval/loss"]),
        ("loss/eval/total", ["eval/loss"]),
        ("metrics/eval/F1/3", ["eval/F1/3"]),
        ("metrics/train/Accuracy", ["train/Accuracy"]),
        ("Accuracy", ["eval/Accuracy"]),  # a training metric must be named with its label
        ("loss", ["eval/loss", "other/loss"]),
        ("loss/eval/part", []),
        ("los", []),
    ],
)
def test_a_logged_key_and_a_shown_name_select_the_same_metric(name: str, metrics: list[str]):
    assert metrics_named(name, METRICS) == metrics


def test_monitors_and_objectives_accept_logged_keys_and_shown_names(tmp_path: Path):
    saver = CheckpointSaver(monitor="metrics/eval/MulticlassAccuracy", mode="max")
    with make_trainer(tmp_path, saver, EarlyStopper("loss/eval/total", patience="5ep")) as trainer:
        trainer.fit()
        for name in ("loss/eval/total", "eval/loss", "loss"):
            assert choose_metric(trainer.state, name) == ("eval", "loss")
        for name in ("MulticlassAccuracy", "metrics/eval/MulticlassAccuracy"):
            result = Result("FINISHED", "r", "", [])
            result.measure(trainer.state, name)
            assert result.objective_name == "eval/MulticlassAccuracy"
        with pytest.raises(
            ValueError, match="monitor='loss/eval/part' is not a metric of this run; there are .*'eval/l"
        ):
            choose_metric(trainer.state, "loss/eval/part")
    assert saver.best_checkpoint is not None


def test_a_command_accepts_a_logged_key_as_its_objective(tmp_path: Path, run_app: Any):
    short = ("trainer.max_duration=1ep", "model=mlp", "data.batch_size=400", "callbacks=none")
    run_app(*short, "objective=loss/eval/total", "hydra.run.dir=r")
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert (result["objective_name"], result["lower_is_better"]) == ("eval/loss", True)
