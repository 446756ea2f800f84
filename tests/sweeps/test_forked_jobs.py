"""A sweep whose jobs are forks of one run: the common beginning is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCHEDULE = ("scheduler=warmup_stable_decay", "scheduler.t_warmup=2ba")
BEGINNING = ("model=mlp", "callbacks=checkpoint_saver", "data.batch_size=200", "trainer.max_duration=4ep", *SCHEDULE)


@pytest.mark.slow
def test_jobs_forked_before_they_differ_equal_runs_from_scratch(tmp_path: Path, run_app: Any):
    keep = ("callbacks.checkpoint_saver.save_interval=5ba", "callbacks.checkpoint_saver.keep=-1")
    run_app(*BEGINNING, *keep, "scheduler.t_decay=0.5dur", "hydra.run.dir=common")
    decays = "scheduler.t_decay=0.25dur,0.5dur"
    finished = run_app("-m", "fork", "common", "ba10", decays, "scheduler.alpha_f=0,0.1", "hydra.sweep.dir=sweep")
    assert "INFO" not in finished.stderr  # differences from the parent are in the log of each job
    run_app(*BEGINNING, "scheduler.t_decay=0.25dur", "scheduler.alpha_f=0.1", "hydra.run.dir=from_scratch")
    last = Path("checkpoints") / "ep4-ba24" / "model.pt"
    weights = {job.name: (job / last).read_bytes() for job in (tmp_path / "sweep").iterdir() if (job / last).is_file()}
    assert len({*weights.values()}) == len(weights) == 4
    expected = (tmp_path / "from_scratch" / last).read_bytes()
    (job,) = [name for name, content in weights.items() if content == expected]
    assert "alpha_f0.1" in job and "t_decay0.25dur" in job
    log = (tmp_path / "sweep" / job / "console.log").read_text()
    assert log.startswith("INFO: fork at ba10 of common") and "scheduler.t_decay: 0.5dur -> 0.25dur" in log
    assert "retrained" not in log


@pytest.mark.slow
def test_a_forked_job_can_be_resumed_and_rerun(tmp_path: Path, run_app: Any):
    run_app(*BEGINNING, "callbacks.checkpoint_saver.save_interval=5ba", "hydra.run.dir=parent")
    run_app("-m", "fork", "parent", "ba5,ba10", "hydra.sweep.dir=sweep")
    (job,) = [folder for folder in (tmp_path / "sweep").iterdir() if "ba10" in folder.name]
    assert "at=" not in (job / "overrides.yaml").read_text()
    run_app("resume", f"sweep/{job.name}", "trainer.max_duration=5ep", "--allow-changes", "trainer")
    again = run_app("rerun", f"sweep/{job.name}", "hydra.run.dir=again")
    assert "has changed since" not in again.stderr
    assert (tmp_path / "again" / "checkpoints" / "latest").exists()
