from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from tiny_runs import tiny_trainer

from runner import LoggerDestination, MetricRecord, Timestamp, Trainer
from runner.training.arguments import ordered_hooks


class ByMetrics(LoggerDestination):
    def __init__(self):
        self.seen = []

    def log_metrics(self, metrics, step):
        self.seen.append((dict(metrics), step))


class Everything(LoggerDestination):
    def __init__(self):
        self.seen = []

    def log_hyperparameters(self, hyperparameters):
        self.seen.append(("hyperparameters", dict(hyperparameters)))

    def log_records(self, records):
        self.seen += [("metrics", record) for record in records]

    def log_table(self, columns, rows, name, step):
        self.seen.append(("table", columns, rows, name, step))

    def log_images(self, images, name, step, captions=None):
        self.seen.append(("images", images.shape, name, step, captions))

    def log_artifact(self, path, name=None):
        self.seen.append(("artifact", path, name))


def make_trainer(*loggers: LoggerDestination, **arguments) -> Trainer:
    return tiny_trainer(loggers=list(loggers), **arguments)


def test_a_destination_that_overrides_nothing_takes_everything(tmp_path: Path):
    (tmp_path / "file").touch()
    with make_trainer(LoggerDestination()) as trainer:
        log = trainer.logger
        log.log_hyperparameters({"a": 1})
        log.log_table(["a"], [[1]], "table")
        log.log_images(numpy.zeros((1, 2, 2, 3), dtype=numpy.uint8), "images")
        log.log_artifact(tmp_path / "file")
        trainer.fit()


def test_records_reach_log_metrics_one_by_one_as_floats():
    one = ByMetrics()
    with make_trainer(one) as trainer:
        trainer.logger.log_metrics({"a": torch.tensor(2.5), "b": 3, "c": True}, step=7)
        trainer.logger.log_metrics({"a": torch.tensor(1, dtype=torch.int64)})
    assert one.seen == [({"a": 2.5, "b": 3.0, "c": 1.0}, 7), ({"a": 1.0}, 0)]
    assert all(type(value) is float for metrics, _ in one.seen for value in metrics.values())


def test_every_kind_of_thing_reaches_every_destination_with_the_step_of_now(tmp_path: Path):
    first, second = Everything(), Everything()
    (tmp_path / "file").touch()
    with make_trainer(first, second, max_duration="3ba") as trainer:
        trainer.fit()
        trainer.logger.flush()
        first.seen.clear()
        second.seen.clear()
        trainer.logger.log_hyperparameters({"model": {"depth": 2}})
        trainer.logger.log_table(["a", "b"], [[1, "x"]], "table")
        trainer.logger.log_images(numpy.zeros((1, 2, 2, 3), dtype=numpy.uint8), "images", captions=["cat"])
        trainer.logger.log_artifact(str(tmp_path / "file"), "plots")
        trainer.logger.log_table(["a"], [], "table", step=9)
    assert first.seen == [
        ("hyperparameters", {"model": {"depth": 2}}),
        ("table", ["a", "b"], [[1, "x"]], "table", 3),
        ("images", (1, 2, 2, 3), "images", 3, ["cat"]),
        ("artifact", tmp_path / "file", "plots"),
        ("table", ["a"], [], "table", 9),
    ]
    assert second.seen == first.seen


def test_a_record_knows_its_timestamp_and_the_wall_clock():
    one = Everything()
    with make_trainer(one, max_duration="2ba") as trainer:
        trainer.fit()
    records: list[MetricRecord] = [entry[1] for entry in one.seen if "loss/train/total" in entry[1].metrics]
    assert [record.step for record in records] == [1, 2]
    assert [record.timestamp.batch for record in records] == [1, 2]
    assert [record.timestamp.sample for record in records] == [2, 4]
    assert isinstance(records[0].timestamp, Timestamp)
    assert 1.7e9 < records[0].wall_time <= records[1].wall_time


def test_a_destination_given_among_the_callbacks_is_one_all_the_same():
    one = Everything()
    with make_trainer(callbacks=[one], max_duration="1ba") as trainer:
        assert trainer.state.loggers == trainer.logger.destinations == (one,)
        assert one not in trainer.state.callbacks
        trainer.fit()
    assert one.seen


@pytest.mark.parametrize(("all_ranks", "works"), [(False, False), (True, True)])
def test_on_other_ranks_only_those_that_ask_for_it_work(monkeypatch, all_ranks: bool, works: bool):
    one = Everything()
    one.all_ranks = all_ranks
    monkeypatch.setenv("RANK", "1")
    *_, loggers = ordered_hooks([], [], [one])
    assert loggers == ((one,) if works else ())
