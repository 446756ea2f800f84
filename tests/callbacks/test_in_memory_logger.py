from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runner import ClassificationModel, Timestamp, Trainer
from runner.callbacks import InMemoryLogger


def make_trainer(*loggers: Any, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, 2, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    return Trainer(
        model=ClassificationModel(nn.Linear(2, 2), num_classes=2),
        train_dataloader=samples,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_duration="2ep",
        loggers=loggers,
        device="cpu",
        **arguments,
    )


def test_metrics_of_a_fit_are_floats_at_the_batch_after(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with make_trainer(memory, run_dir=tmp_path) as trainer:
        trainer.fit()
        series = memory.data["loss/train/total"]  # complete without waiting for the background thread
        assert [timestamp.batch for timestamp, _ in series] == [1, 2, 3, 4, 5, 6]
        assert [timestamp.sample for timestamp, _ in series] == [4, 8, 12, 16, 20, 24]
        assert all(type(value) is float for _, value in series)
        assert series[-1][1] == float(trainer.state.total_loss)
    assert memory.get_timeseries("loss/train/total") == ([1, 2, 3, 4, 5, 6], [value for _, value in series])


def test_an_explicit_step_is_the_batch_of_the_timestamp(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with make_trainer(memory, run_dir=tmp_path) as trainer:
        trainer.logger.log_metrics({"a": torch.tensor(math.inf), "b": 2}, step=40)
        assert memory.data["a"] == [(Timestamp(batch=40), math.inf)]
        assert memory.get_timeseries("b") == ([40], [2.0])


def test_everything_else_is_kept_too(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    images = np.zeros((1, 2, 2, 3), np.uint8)
    file = tmp_path / "a.txt"
    file.touch()
    with make_trainer(memory, run_dir=tmp_path) as trainer:
        trainer.logger.log_hyperparameters({"lr": 0.1})
        trainer.logger.log_hyperparameters({"depth": {"n": 2}})
        trainer.logger.log_table(["x"], [(1,)], "t", step=1)
        trainer.logger.log_table(["x"], [(2,)], "t", step=2)
        trainer.logger.log_images(images, "i", step=3, captions=["c"])
        trainer.logger.log_artifact(file, "texts")
    assert memory.hyperparameters == {"lr": 0.1, "depth": {"n": 2}}
    assert memory.tables == {"t": {"columns": ["x"], "rows": [[2]], "step": 2}}
    assert memory.images == {"i": [{"images": images, "step": 3, "captions": ["c"]}]}
    assert memory.artifacts == [(str(file), "texts")]
    assert memory.state_dict() == {}


def test_a_key_that_was_not_logged_is_named_with_those_that_were(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with make_trainer(memory, run_dir=tmp_path) as trainer:
        trainer.logger.log_metrics({"loss": 1.0})
        with pytest.raises(KeyError, match="key='los' was not logged; there are loss"):
            memory.get_timeseries("los")
