"""Runs that pause at the end of a session, or are interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kept_runs import QUIET, status, weights

from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_timestamp

ENDLESS = (
    "model=mlp",
    "data.batch_size=400",
    "data.eval_batch_size=300",
    "trainer.eval_interval=0",
    "scheduler=none",
    *QUIET,
)


@pytest.mark.slow
def test_two_ranks_pause_at_the_same_batch_and_resume_bit_for_bit(tmp_path: Path, run_app: Any):
    two = (*ENDLESS, "launch.nproc_per_node=2", "callbacks.checkpoint_saver.save_interval=0")
    run_app(*two, "trainer.max_duration=1000000ba", "trainer.session=1s", "hydra.run.dir=run")
    assert status(tmp_path / "run") == "PAUSED"
    end = f"trainer.max_duration={read_timestamp(find_checkpoint(tmp_path / 'run')).batch + 4}ba"
    run_app("resume", "run", "trainer.session=null", end)
    assert status(tmp_path / "run") == "FINISHED"
    run_app(*two, end, "hydra.run.dir=whole")
    last = find_checkpoint(tmp_path / "whole").name
    assert weights(tmp_path / "run", last) == weights(tmp_path / "whole", last)


@pytest.mark.slow
def test_a_sweep_continues_after_a_paused_job(tmp_path: Path, run_app: Any):
    sweep = ("-m", *ENDLESS, "seed=0,1", "hydra.sweep.dir=sweep", "trainer.session=0.3s")
    assert "2 paused" in run_app(*sweep, "trainer.max_duration=1000000ba").stdout


@pytest.mark.slow
def test_a_session_that_cannot_save_its_checkpoint_fails(tmp_path: Path, run_app: Any):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from runner import Callback\n"
        "class Spoiler(Callback):\n"
        "    def batch_end(self, state, logger):\n"
        "        with torch.no_grad():\n"
        "            next(state.unwrapped_model.parameters()).fill_(float('nan'))\n"
    )
    spoilt = ("+callbacks.spoiler._target_=own.Spoiler", "trainer.max_duration=1000000ba", "trainer.session=0.3s")
    done = run_app(*ENDLESS, *spoilt, "hydra.run.dir=run", exit_code=1)
    assert "no checkpoint was written after batch" in done.stderr and status(tmp_path / "run") == "FAILED"


def test_an_interrupted_run_keeps_its_last_evaluation(tmp_path: Path, run_here: Any):
    (tmp_path / "own.py").write_text(
        "import signal\n"
        "from runner import Callback\n"
        "class Impatient(Callback):\n"
        "    def epoch_start(self, state, logger):\n"
        "        if state.timestamp.epoch == 1:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
    )
    typed = ("model=mlp", "trainer.max_duration=3ep", *QUIET, "+callbacks.impatient._target_=own.Impatient")
    run_here(*typed, "hydra.run.dir=outputs/run", code=130)
    assert status(tmp_path / "outputs" / "run") == "KILLED"
    assert "1 run in outputs/, killed" in run_here("runs", "eval/loss>0", code=0).out
