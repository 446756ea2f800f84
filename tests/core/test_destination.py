"""Logger destinations: which methods receive what is logged, with which steps and times, and on which ranks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from tiny_runs import tiny_trainer

from runner import LoggerDestination, MetricRecord, Timestamp, Trainer
from runner.training.arguments import ordered_hooks


class MetricsDestination(LoggerDestination):
    """Overrides `log_metrics` alone."""

    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step):
        self.calls.append((dict(metrics), step))


class AllDestination(LoggerDestination):
    """Overrides the methods for metrics, hyperparameters, tables, images and files, and records their calls."""

    def __init__(self):
        self.calls = []

    def log_hyperparameters(self, hyperparameters):
        self.calls.append(("hyperparameters", dict(hyperparameters)))

    def log_records(self, records):
        self.calls += [("metrics", record) for record in records]

    def log_table(self, columns, rows, name, step):
        self.calls.append(("table", columns, rows, name, step))

    def log_images(self, images, name, step, captions=None):
        self.calls.append(("images", images.shape, name, step, captions))

    def log_artifact(self, path, name=None):
        self.calls.append(("artifact", path, name))


def make_trainer(*loggers: LoggerDestination, **arguments) -> Trainer:
    return tiny_trainer(loggers=list(loggers), **arguments)


def test_a_destination_that_overrides_nothing_accepts_all_calls(tmp_path: Path):
    (tmp_path / "file").touch()
    with make_trainer(LoggerDestination()) as trainer:
        log = trainer.logger
        log.log_hyperparameters({"a": 1})
        log.log_table(["a"], [[1]], "table")
        log.log_images(numpy.zeros((1, 2, 2, 3), dtype=numpy.uint8), "images")
        log.log_artifact(tmp_path / "file")
        trainer.fit()


def test_log_metrics_gets_each_record_as_floats():
    destination = MetricsDestination()
    with make_trainer(destination) as trainer:
        trainer.logger.log_metrics({"a": torch.tensor(2.5), "b": 3, "c": True}, step=7)
        trainer.logger.log_metrics({"a": torch.tensor(1, dtype=torch.int64)})
    assert destination.calls == [({"a": 2.5, "b": 3.0, "c": 1.0}, 7), ({"a": 1.0}, 0)]
    assert all(type(value) is float for metrics, _ in destination.calls for value in metrics.values())


def test_all_destinations_get_tables_images_and_files_with_the_current_step(tmp_path: Path):
    first, second = AllDestination(), AllDestination()
    (tmp_path / "file").touch()
    with make_trainer(first, second, max_duration="3ba") as trainer:
        trainer.fit()
        trainer.logger.flush()
        first.calls.clear()
        second.calls.clear()
        trainer.logger.log_hyperparameters({"model": {"depth": 2}})
        trainer.logger.log_table(["a", "b"], [[1, "x"]], "table")
        trainer.logger.log_images(numpy.zeros((1, 2, 2, 3), dtype=numpy.uint8), "images", captions=["cat"])
        trainer.logger.log_artifact(str(tmp_path / "file"), "plots")
        trainer.logger.log_table(["a"], [], "table", step=9)
    assert first.calls == [
        ("hyperparameters", {"model": {"depth": 2}}),
        ("table", ["a", "b"], [[1, "x"]], "table", 3),
        ("images", (1, 2, 2, 3), "images", 3, ["cat"]),
        ("artifact", tmp_path / "file", "plots"),
        ("table", ["a"], [], "table", 9),
    ]
    assert second.calls == first.calls


def test_a_record_has_step_timestamp_and_wall_clock_time():
    destination = AllDestination()
    with make_trainer(destination, max_duration="2ba") as trainer:
        trainer.fit()
    records: list[MetricRecord] = [call[1] for call in destination.calls if "loss/train/total" in call[1].metrics]
    assert [record.step for record in records] == [1, 2]
    assert [record.timestamp.batch for record in records] == [1, 2]
    assert [record.timestamp.sample for record in records] == [2, 4]
    assert isinstance(records[0].timestamp, Timestamp)
    assert 1.7e9 < records[0].wall_time <= records[1].wall_time


def test_a_destination_in_callbacks_becomes_a_logger():
    destination = AllDestination()
    with make_trainer(callbacks=[destination], max_duration="1ba") as trainer:
        assert trainer.state.loggers == trainer.logger.destinations == (destination,)
        assert destination not in trainer.state.callbacks
        trainer.fit()
    assert destination.calls


@pytest.mark.parametrize("all_ranks", [False, True])
def test_other_ranks_keep_only_destinations_with_all_ranks(monkeypatch, all_ranks: bool):
    destination = AllDestination()
    destination.all_ranks = all_ranks
    monkeypatch.setenv("RANK", "1")
    *_, loggers = ordered_hooks([], [], [destination])
    assert loggers == ((destination,) if all_ranks else ())
