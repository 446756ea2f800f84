"""Runs that are killed before their first or after their last checkpoint can be resumed."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from kept_runs import QUIET, SHORT, status, tree, weights
from python_process import run_python, wait_until
from stores import query

# Code of a user that kills the process at a batch or after the last checkpoint, unless the file `spared` exists.
OWN = """
import os, signal
from runner.callbacks import CheckpointSaver
from runner import Callback


def end(state, logger):
    if not os.path.exists("spared"):
        logger.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class Killed(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.batch:
            end(state, logger)


class KilledAfterTheLast(CheckpointSaver):
    def fit_end(self, state, logger):
        super().fit_end(state, logger)
        end(state, logger)
"""


def in_mlflow(folder: Path) -> tuple[list[Any], list[int]]:
    """Return the statuses of all runs, and the steps at which they logged their losses, in order."""
    store = folder / "outputs" / "mlflow.db"
    statuses = query(store, "select status from runs")
    steps = query(store, "select step from metrics where key = 'loss/train/total' order by step")
    return [status for (status,) in statuses], [step for (step,) in steps]


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_resumes_from_the_start(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    start = (*SHORT, "callbacks=[mlflow_logger,checkpoint_saver]")
    killer = ("+callbacks.own._target_=own.Killed", "+callbacks.own.batch=2")
    run_app(*start, *killer, "hydra.run.dir=run", exit_code=-signal.SIGKILL)
    run = tmp_path / "run"
    assert status(run) == "RUNNING" and not (run / "checkpoints").exists()
    refused = run_app("resume", "run", "seed=1", exit_code=2)  # the logged values belong to the first config
    assert refused.stderr.splitlines()[1].endswith("the run was trained with a different config so far:")
    (run / "checkpoints" / ".ep1-ba3.partial-1").mkdir(parents=True)  # as if killed while saving
    (run / "checkpoints" / ".ep1-ba3.partial-1" / "manifest.json").write_text('{"fil')

    (tmp_path / "spared").touch()
    done = run_app("resume", "run")
    assert "INFO: RUN='run': ended before its first checkpoint; starting from the beginning\n" in done.stderr
    assert status(run) == "FINISHED"
    wait_until(lambda: in_mlflow(tmp_path) == (["FINISHED"], [1, 2, 3, 4, 5, 6]))
    assert yaml.safe_load((run / "sessions" / "1" / "overrides.yaml").read_text()) == [*start, *killer]
    run_app(*SHORT, *QUIET, "hydra.run.dir=whole")
    assert weights(run) == weights(tmp_path / "whole")
    left = {path.name for path in tmp_path.glob("*")}
    assert left - {"__pycache__"} == {"own.py", "spared", "run", "whole", "outputs"}


@pytest.mark.slow
def test_a_run_that_saved_checkpoints_never_resumes_from_the_start(tmp_path: Path, run_app: Any):
    run_app(*SHORT, *QUIET, "hydra.run.dir=run", "callbacks.checkpoint_saver.folder=deep/er")
    before = tree(tmp_path / "run")
    refused = run_app("resume", "run", exit_code=2)  # the message names the folder of the config
    assert "no complete checkpoint there" in refused.stderr
    for manifest in (tmp_path / "run").rglob("manifest.json"):
        manifest.unlink()
    (tmp_path / "run" / "deep" / "er").rename(tmp_path / "run" / "checkpoints")
    refused = run_app("resume", "run", exit_code=2)
    assert "complete: run/checkpoints/ep1-ba3, run/checkpoints/ep2-ba6" in refused.stderr
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    refused = run_app("resume", "run", exit_code=2)
    assert "has finished without a checkpoint; python -m runner rerun run trains it again" in refused.stderr
    assert {*tree(tmp_path / "run")} < {*before}
    (tmp_path / "never").mkdir()
    for folder in ("never", "outputs"):
        assert run_app("resume", folder, exit_code=2).stderr.count("error: RUN=") == 1


@pytest.mark.slow
def test_resuming_a_run_killed_after_its_last_checkpoint_only_finishes_it(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(OWN)
    callbacks = "callbacks=[mlflow_logger,checkpoint_saver,learning_curves]"
    killer = "callbacks.checkpoint_saver._target_=own.KilledAfterTheLast"
    run_app(*SHORT, callbacks, killer, "hydra.run.dir=run", exit_code=-signal.SIGKILL)
    run = tmp_path / "run"
    assert status(run) == "RUNNING" and not (run / "learning_curves.csv").exists()
    before = weights(run)
    (tmp_path / "spared").touch()
    assert "INFO" not in run_app("resume", "run").stderr
    assert status(run) == "FINISHED" and weights(run) == before and (run / "learning_curves.csv").stat().st_size > 100
    wait_until(lambda: in_mlflow(tmp_path) == (["FINISHED"], [1, 2, 3, 4, 5, 6]))
    result = json.loads((run / "result.json").read_text())
    assert result["objective_name"] == "eval/MulticlassAccuracy" and result["objective"] > 0
    refused = run_app("resume", "run", exit_code=2)
    assert "'2ep' is reached: this run has finished" in refused.stderr
    assert refused.stderr.endswith("add trainer.max_duration=<more than 2ep>\n")
    assert status(run) == "FINISHED"


@pytest.mark.slow
def test_a_restart_by_torchrun_after_the_last_checkpoint_finishes_the_run(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "import os, signal\n"
        "from runner import Callback\n"
        "class Dying(Callback):\n"
        "    def post_close(self):\n"
        "        if not os.path.exists('died') and os.environ['RANK'] == '0':\n"
        "            open('died', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "-m", "runner")
    arguments = (*SHORT, *QUIET, "hydra.run.dir=run", "+callbacks.dying._target_=own.Dying")
    done = run_python([*torchrun, *arguments], cwd=tmp_path, check=True)
    assert (tmp_path / "died").exists() and status(tmp_path / "run") == "FINISHED"
    assert "error" not in [line.partition(":")[0] for line in done.stderr.splitlines()]


def test_a_damaged_checkpoint_is_reported_once_for_all_ranks(tmp_path: Path, run_app: Any):
    ranks = "launch.nproc_per_node=2"
    run_app(*SHORT, *QUIET, ranks, "hydra.run.dir=run")
    (tmp_path / "run/checkpoints/ep2-ba6/model.pt").write_bytes(b"")
    stderr = run_app("resume", "run", ranks).stderr
    assert stderr.count("ep2-ba6 is not used: the size of model.pt differs") == 1
