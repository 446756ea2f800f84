from __future__ import annotations

import importlib.util
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from limited_files import limited_files
from logged_runs import make_trainer

from runner import MetricRecord, Timestamp
from runner.callbacks import CheckpointSaver, InMemoryLogger, TensorBoardLogger
from runner.callbacks._event_file import MAX_TEMPLATES, EventFile, checksum
from runner.libraries.extras import how_to_install

installed = importlib.util.find_spec("tensorboard") is not None
needs_tensorboard = pytest.mark.skipif(not installed, reason="needs the package tensorboard")


def read(folder: Path) -> Any:
    """Return the events of a folder as TensorBoard reads them."""
    from tensorboard.backend.event_processing import event_accumulator

    accumulator = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def text(events: Any, tag: str) -> str:
    (entry,) = events.Tensors(f"{tag}/text_summary")
    return entry.tensor_proto.string_val[0].decode()


@needs_tensorboard
def test_tensorboard_reads_what_was_logged(tmp_path: Path):
    memory = InMemoryLogger()
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4, 1)
    with make_trainer(tmp_path, TensorBoardLogger(), memory, config={"lr": 0.1}) as trainer:
        trainer.fit()
        trainer.logger.log_metrics({"odd": math.nan}, step=9)
        trainer.logger.log_table(["x", "y"], [[1, "a|b"], [0.123456, None]], "table")
        trainer.logger.log_images(images, "Images/Train", captions=["one", "two"])
    events = read(tmp_path / "tensorboard")
    assert set(events.Tags()["scalars"]) == memory.data.keys()
    for key in memory.data:
        steps, values = memory.get_timeseries(key)
        scalars = events.Scalars(key)
        assert [event.step for event in scalars] == steps
        assert [event.value for event in scalars] == pytest.approx(values, nan_ok=True)
    assert '"lr": 0.1' in text(events, "hyperparameters")
    assert text(events, "table").splitlines() == ["| x | y |", "| --- | --- |", "| 1 | a\\|b |", "| 0.1235 | None |"]
    assert text(events, "Images/Train/captions").splitlines() == ["1. one", "1. two"]
    (image,) = events.Images("Images/Train")
    assert (image.step, image.height, image.width) == (6, 3, 8)


@needs_tensorboard
def test_checksums_equal_those_of_tensorboard():
    from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

    contents = [random.Random(length).randbytes(length) for length in (*range(20), 1000, 5000)]
    expected = [pywrap_tensorflow.masked_crc32c(content).to_bytes(4, "little") for content in contents]
    assert [checksum(content) for content in contents] == expected


@needs_tensorboard
def test_metrics_are_written_as_the_same_bytes_as_their_events(tmp_path: Path):
    keys = [("a",), ("a", "b"), ("b", "a"), *((f"key {number}",) for number in range(MAX_TEMPLATES)), ("a", "b")]
    numbers = [0.0, -1.5, math.nan, math.inf, 1e-3, 0.0]
    metrics = [
        {key: numbers[(step + index) % 6] for index, key in enumerate(names)} for step, names in enumerate(keys * 3)
    ]
    records = [MetricRecord(values, step, Timestamp(), 1e9 + step) for step, values in enumerate(metrics)]
    values = [[{"tag": key, "simple_value": value} for key, value in record.metrics.items()] for record in records]
    events = [{"wall_time": 1e9 + step, "step": step, "summary": {"value": value}} for step, value in enumerate(values)]
    written = []
    for name in ("metrics", "events"):
        file = EventFile(tmp_path / name, None)
        (path,) = (tmp_path / name).iterdir()
        start = path.stat().st_size
        file.write_metrics(records) if name == "metrics" else file.write(events)
        file.close()
        written.append(path.read_bytes()[start:])
    assert written[0] == written[1]


@needs_tensorboard
def test_events_before_and_after_a_full_disk_can_be_read(tmp_path: Path):
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    file = EventFile(tmp_path, None)
    summaries = [Summary(value=[Summary.Value(tag="a", simple_value=value)]) for value in range(9)]
    events = [{"wall_time": 0.0, "step": step, "summary": summary} for step, summary in enumerate(summaries)]
    file.write(events[:2])
    with limited_files(next(tmp_path.iterdir()).stat().st_size + 60), pytest.raises(OSError, match="No space left"):
        file.write(events[2:7])
    file.write(events[7:])
    file.close()
    assert [event.step for event in read(tmp_path).Scalars("a")] == [0, 1, 7, 8]


@needs_tensorboard
def test_a_resumed_run_logs_each_step_once(tmp_path: Path):
    with make_trainer(tmp_path / "whole", TensorBoardLogger(), duration="3ep") as trainer:
        trainer.fit()
    saver = CheckpointSaver(save_interval="2ba", keep=-1)
    with make_trainer(tmp_path / "cut", TensorBoardLogger(), duration="6ba", callbacks=[saver]) as trainer:
        trainer.fit()
    checkpoint = tmp_path / "cut" / "checkpoints" / "ep1-ba4"
    with make_trainer(tmp_path / "cut", TensorBoardLogger(), duration="3ep", resume_path=checkpoint) as trainer:
        trainer.fit()
    whole, resumed = (read(tmp_path / name / "tensorboard").Scalars("loss/train/total") for name in ("whole", "cut"))
    assert [(event.step, event.value) for event in resumed] == [(event.step, event.value) for event in whole]


@needs_tensorboard
def test_a_run_without_training_leaves_no_folder(tmp_path: Path):
    with make_trainer(tmp_path, TensorBoardLogger(), config={"lr": 0.1}):
        pass
    assert not (tmp_path / "tensorboard").exists()


def test_a_missing_tensorboard_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    message = f"TensorBoardLogger needs tensorboard, not installed here: {how_to_install('tensorboard')}"
    with pytest.raises(ImportError, match=re.escape(message)):
        TensorBoardLogger()


@pytest.mark.parametrize("folder", ["", "/tmp/board", "../board"])
def test_a_folder_outside_the_run_is_refused(folder: str):
    with pytest.raises(ValueError, match=f"folder='{folder}'"):
        TensorBoardLogger(folder)
