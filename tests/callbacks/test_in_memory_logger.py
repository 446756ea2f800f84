from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from logged_runs import make_trainer

from runner import Timestamp
from runner.callbacks import InMemoryLogger


def test_metrics_of_a_fit_are_floats_with_the_number_of_trained_batches(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with make_trainer(tmp_path, memory) as trainer:
        trainer.fit()
        series = memory.data["loss/train/total"]  # complete without waiting for the background thread
        assert [timestamp.batch for timestamp, _ in series] == [1, 2, 3, 4, 5, 6]
        assert [timestamp.sample for timestamp, _ in series] == [4, 8, 12, 16, 20, 24]
        assert all(type(value) is float for _, value in series)
        assert series[-1][1] == float(trainer.state.total_loss)
    assert memory.get_timeseries("loss/train/total") == ([1, 2, 3, 4, 5, 6], [value for _, value in series])


def test_an_explicit_step_is_the_batch_of_the_timestamp(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with make_trainer(tmp_path, memory) as trainer:
        trainer.logger.log_metrics({"a": torch.tensor(math.inf), "b": 2}, step=40)
        assert memory.data["a"] == [(Timestamp(batch=40), math.inf)]
        assert memory.get_timeseries("b") == ([40], [2.0])


def test_hyperparameters_tables_images_and_artifacts_are_kept(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    images = np.zeros((1, 2, 2, 3), np.uint8)
    file = tmp_path / "a.txt"
    file.touch()
    with make_trainer(tmp_path, memory) as trainer:
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


def test_the_error_for_an_unknown_key_lists_the_logged_keys(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with make_trainer(tmp_path, memory) as trainer:
        trainer.logger.log_metrics({"loss": 1.0})
        with pytest.raises(KeyError, match="key='los' was not logged; there are loss"):
            memory.get_timeseries("los")
