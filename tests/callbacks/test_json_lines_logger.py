from __future__ import annotations

import json
import math
import random
import re
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_runs import make_trainer

from runner.callbacks import CheckpointSaver, InMemoryLogger, JSONLinesLogger, MLflowLogger


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, after asserting that they are standard JSON."""
    return [json.loads(line, parse_constant=refuse_constant) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[tuple[int, float]]:
    records = [(line["step"], line["metrics"]) for line in read(path) if "metrics" in line]
    return [(step, metrics["loss/train/total"]) for step, metrics in records if "loss/train/total" in metrics]


def test_each_record_is_a_line_with_its_timestamp(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    file = tmp_path / "a.txt"
    file.touch()
    with make_trainer(tmp_path, JSONLinesLogger(), memory, config={"lr": 0.1}) as trainer:
        trainer.fit()
        trainer.logger.log_metrics({"a": math.nan, "b": math.inf, "c": torch.tensor(-math.inf)}, step=9)
        trainer.logger.log_table(["x", "y"], [[1, math.nan]], "t")
        trainer.logger.log_artifact(file, "texts")
    lines = read(tmp_path / "metrics.jsonl")
    assert lines[0] == {"hyperparameters": {"lr": 0.1}}
    steps, values = memory.get_timeseries("loss/train/total")
    assert losses(tmp_path / "metrics.jsonl") == [*zip(steps, values, strict=True)]
    [special] = [line for line in lines if line.get("step") == 9]
    assert special["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert (special["epoch"], special["sample"], special["token"]) == (2, 24, trainer.state.timestamp.token)
    assert {"table": "t", "step": 6, "epoch": 2, "columns": ["x", "y"], "rows": [[1, "NaN"]]} in lines
    assert {"artifact": str(file), "folder": "texts"} in lines


def test_all_numbers_and_keys_are_read_back_unchanged(tmp_path: Path) -> None:
    generator = random.Random(0)
    values = [struct.unpack("<d", generator.randbytes(8))[0] for _ in range(1000)] + [0.1, -0.0, 5e-324, 1e16, 2.0**70]
    metrics = {f"value/{index}": value for index, value in enumerate(values) if math.isfinite(value)}
    other: dict[Any, float] = {7: 5.0, "at": math.nan}
    separators = "next\x85line, line \u2028, paragraph \u2029"  # str.splitlines splits at these
    odd = {"null": 1.0, "lone surrogate \ud83d": 2.0, 'quote" and \\ and \n': 3.0, "größe": 4.0}
    with make_trainer(tmp_path, JSONLinesLogger(), duration="1ba") as trainer:
        trainer.fit()
        trainer.logger.log_metrics(metrics, step=8)
        trainer.logger.log_metrics(odd, step=9)
        trainer.logger.log_metrics(other, step=2**70)
        trainer.logger.log_metrics({separators: 6.0}, step=10)
    assert (tmp_path / "metrics.jsonl").read_bytes().isascii()
    logged = {line["step"]: line["metrics"] for line in read(tmp_path / "metrics.jsonl") if "metrics" in line}
    assert logged[8] == metrics and str(logged[8]) == str(metrics)  # the text shows the sign of zero
    assert logged[9] == odd
    assert logged[10] == {separators: 6.0}
    assert logged[2**70] == {"7": 5.0, "at": "NaN"}


@pytest.mark.parametrize("logger", [JSONLinesLogger, MLflowLogger])
def test_without_orjson_the_error_says_how_to_install_it(logger: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orjson", None)  # as if it were not installed
    message = f"{logger.__name__} needs orjson, not installed here: pip install -e ."
    with pytest.raises(ImportError, match=re.escape(message)):
        logger()


def test_a_resumed_run_logs_no_step_twice(tmp_path: Path) -> None:
    with make_trainer(tmp_path / "whole", JSONLinesLogger(), duration="3ep") as trainer:
        trainer.fit()
    saver = CheckpointSaver(save_interval="2ba")
    arguments = {"callbacks": [saver], "config": {"a": 1}}
    with make_trainer(tmp_path / "cut", JSONLinesLogger(), duration="4ba", **arguments) as trainer:
        trainer.fit()
    path = tmp_path / "cut" / "metrics.jsonl"
    with path.open("a") as file:  # what a killed run leaves: a later step, and a line that was cut off
        file.write('{"step":5,"metrics":{"loss/train/total":0}}\n{"step":6,"met')
    resume = {"resume_path": tmp_path / "cut", "config": {"a": 1}, "duration": "3ep"}
    with make_trainer(tmp_path / "cut", JSONLinesLogger(), **resume) as trainer:
        assert trainer.state.timestamp.batch == 4
        trainer.fit()
    assert losses(path) == losses(tmp_path / "whole" / "metrics.jsonl")
    assert sum("hyperparameters" in line for line in read(path)) == 1


@pytest.mark.parametrize("filename", ["", "/tmp/a.jsonl", "../a.jsonl"])
def test_a_file_outside_the_run_is_refused(filename: str) -> None:
    with pytest.raises(ValueError, match=f"filename='{filename}'"):
        JSONLinesLogger(filename)


def test_a_resumed_run_reads_a_large_file_line_by_line(tmp_path: Path):
    with make_trainer(tmp_path, JSONLinesLogger(), callbacks=[CheckpointSaver()]) as trainer:
        trainer.fit()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.writelines(f'{{"step":1,"epoch":0,"filler":"{"x" * 1000}"}}\n' for _ in range(10_000))
    logger = JSONLinesLogger()
    with make_trainer(tmp_path, logger, duration="3ep", resume_path=tmp_path):
        tracemalloc.start()
        try:
            logger.log_hyperparameters({"own": 1})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 1e6  # bytes, for a file of 10 MB
    assert read(path)[-1] == {"hyperparameters": {"own": 1}}
