"""Runs that end with a loss or objective that is not finite: exit code, record, sweeps, and allowing it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from kept_runs import SHORT, status
from main_runs import query, run_folders

OWN = """
import math

from runner import Callback, ClassificationModel
from torch import nn


class Undefined(ClassificationModel):
    \"\"\"Trains well, but its evaluation loss is nan.\"\"\"

    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)

    def loss(self, outputs, batch):
        return super().loss(outputs, batch) * (1.0 if self.training else math.nan)
"""
QUIET = (*SHORT, "callbacks=[checkpoint_saver]")
HOT = "optimizer.lr=1e30"
UNDEFINED = ("~model", "+model._target_=own.Undefined", *(argument for argument in QUIET if argument != "model=mlp"))


def test_a_run_whose_last_loss_is_not_finite_has_diverged(run_here: Any, tmp_path: Path):
    done = run_here(*SHORT, HOT, "callbacks=[mlflow_logger,checkpoint_saver]", code=3)
    assert "error: the run has diverged: the loss of the last batch is nan. Lower the learning rate" in done.err
    assert "look for nan in the data" in done.err
    assert "Traceback" not in done.err and "--allow-divergence accepts such a run" in done.err
    (folder,) = run_folders(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "DIVERGED" and result["metrics"]["eval/loss"] == "nan"
    assert (
        result["error"]["message"].startswith("the run has diverged")
        and not (folder / "checkpoints" / "latest").exists()
    )
    assert query(tmp_path, "select status from runs") == [("FAILED",)]


def test_allow_divergence_records_the_run_as_finished(run_here: Any, tmp_path: Path):
    done = run_here(*QUIET, HOT, "--allow-divergence", code=0)
    assert "diverged" not in done.err
    assert [status(folder) for folder in run_folders(tmp_path)] == ["FINISHED"]


def test_a_run_whose_objective_is_not_finite_has_diverged(run_here: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    done = run_here(*UNDEFINED, "objective=eval/loss", code=3)
    assert "error: the run has diverged: objective eval/loss is nan" in done.err
    run_here(*UNDEFINED, "objective=eval/MulticlassAccuracy", code=0)
    assert sorted(status(folder) for folder in run_folders(tmp_path)) == ["DIVERGED", "FINISHED"]


@pytest.mark.parametrize(
    "ender",
    [
        ("+callbacks=nan_monitor",),
        ("+algorithms=nan_guard", "algorithms.nan_guard.policy=raise"),
        ("+algorithms=spike_guard", "algorithms.spike_guard.interval=1", "algorithms.spike_guard.limit=1"),
    ],
    ids=lambda ender: ender[0].partition("=")[2],
)
def test_a_run_that_a_monitor_or_guard_ends_is_diverged(run_here: Any, tmp_path: Path, ender: tuple[str, ...]):
    done = run_here(*QUIET, HOT, *ender, code=3)
    assert "error: the run has diverged: " in done.err and "Traceback" not in done.err
    (folder,) = run_folders(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "DIVERGED" and result["error"]["code"] == "diverged" and not result["trace"]


def test_a_guard_that_ends_the_first_batch_reports_divergence_not_a_wrong_config(run_here: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN.replace("1.0 if self.training else math.nan", "math.nan"))
    done = run_here(*UNDEFINED, "+algorithms=nan_guard", "algorithms.nan_guard.policy=raise", code=3)
    assert "epoch 1, batch 1" in done.err


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_another_rank_ends_the_run_as_diverged(run_here: Any, tmp_path: Path):
    text = OWN.replace("self.training", "get_global_rank() == 0").replace(
        "import Callback", "import Callback, get_global_rank"
    )
    (tmp_path / "own.py").write_text(text)
    done = run_here(*UNDEFINED, "+callbacks=nan_monitor", "launch.nproc_per_node=2", code=3)
    assert "error: the run has diverged: the loss is nan on rank 1, epoch 1, batch 1" in done.err
    assert "Traceback" not in done.err and "failed" not in done.err


@pytest.mark.slow
def test_a_sweep_continues_after_a_diverged_job_and_lists_it(run_here: Any, tmp_path: Path):
    sweep = ("-m", "optimizer.lr=1e30,0.01", *QUIET)
    done = run_here(*sweep, code=0)
    assert "lr1e+30-mlp-digits: DIVERGED" in done.err and "the run has diverged" in done.err
    assert "Traceback" not in done.err
    assert "1 finished, 1 diverged" in done.out
    (file,) = tmp_path.glob("outputs/sweeps/*/*/jobs.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert {(float(row["lr"]), row["status"]) for row in rows} == {(0.01, "FINISHED"), (1e30, "DIVERGED")}
    again = run_here(*sweep, code=0)
    assert again.out.count("skipped: it has already ended") == 2


@pytest.mark.slow
@pytest.mark.parametrize("launch", [(), ("-m", "seed=0,1")], ids=["one run", "a sweep"])
def test_two_ranks_report_divergence_once(run_app: Any, tmp_path: Path, launch: tuple[str, ...]):
    done = run_app(*launch, *QUIET, HOT, "launch.nproc_per_node=2", exit_code=0 if launch else 3)
    assert done.stderr.count("the run has diverged") == 1
    assert "Traceback" not in done.stderr
    folders = run_folders(tmp_path, "outputs/sweeps/*/*/*digits*" if launch else "outputs/20*/*")
    assert [status(folder) for folder in folders] == ["DIVERGED"] * (2 if launch else 1)
