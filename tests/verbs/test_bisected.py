"""`git bisect run` finds bad commits by the exit codes of `verify` and `verdict`, in a small repository of a user."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kept_runs import git

SMALL = ("data.batch_size=200", "trainer.max_duration=1ep", "callbacks=[checkpoint_saver,state_digest]")
MODEL = ("model=mlp", "model._target_=own.Model", "~model.module", "~model.num_classes")
OWN = """
from torch import nn

from runner import ClassificationModel


class Model(ClassificationModel):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)

    def forward(self, batch):
        return super().forward(batch)
"""
CHANGED = OWN.replace("super().forward(batch)", "super().forward(batch) * 1.001")
WORSE = OWN.replace("super().forward(batch)", "super().forward(batch) * -0.01")
DIVERGING = OWN.replace("super().forward(batch)", "super().forward(batch) * float('nan')")
BROKEN = "this is no Python\n"
RUNNER = f"{sys.executable} -m runner"


def make_repository(folder: Path, versions: list[str]) -> None:
    """Make a repository with a commit for each version of the model, numbered by a comment so that no two are equal."""
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("run*\noutputs\n__pycache__\n")
    git(folder, "add", ".gitignore")
    for number, content in enumerate(versions):
        (folder / "own.py").write_text(f"# {number}\n{content}")
        git(folder, "add", "own.py")
        git(folder, "commit", "--quiet", "-m", f"commit {number}")


def first_bad_commit(folder: Path, command: str, good: str) -> tuple[str, str]:
    """Return the subject of the first bad commit after a good one, and the output of `git bisect run`."""
    git(folder, "bisect", "start", "HEAD", good)
    output = git(folder, "bisect", "run", "sh", "-c", command)
    subject = git(folder, "log", "-1", "--format=%s", "refs/bisect/bad")
    git(folder, "bisect", "reset")
    return subject, output


@pytest.mark.slow
def test_bisecting_verify_finds_the_first_commit_that_changes_results(tmp_path: Path, run_app: Any):
    versions = [OWN] * 10 + [CHANGED] * 6
    versions[7] = versions[12] = BROKEN
    make_repository(tmp_path, versions)
    git(tmp_path, "checkout", "--quiet", "HEAD~15")
    run_app(*SMALL, *MODEL, "hydra.run.dir=run", "callbacks.state_digest.interval=1ba")
    assert run_app("verify", "run", "--batches=2").returncode == 0
    git(tmp_path, "checkout", "--quiet", "-")
    subject, output = first_bad_commit(tmp_path, f"{RUNNER} verify run --batches 2", "HEAD~15")
    assert subject == "commit 10" and "different" in output
    assert git(tmp_path, "status", "--short") == ""


@pytest.mark.slow
@pytest.mark.parametrize("worse", [WORSE, DIVERGING], ids=["worse", "diverging"])
def test_bisecting_verdict_finds_the_first_commit_that_worsens_the_metric(worse: str, tmp_path: Path, run_app: Any):
    make_repository(tmp_path, [OWN, OWN, BROKEN, OWN, CHANGED, CHANGED, worse, worse])
    git(tmp_path, "checkout", "--quiet", "HEAD~7")
    seeds = "seed=0,1,2,3,4,5"
    run_app(*SMALL, *MODEL, "hydra.run.dir=run")
    run_app("-m", "rerun", "run", seeds, "hydra.sweep.dir=run_good")
    git(tmp_path, "checkout", "--quiet", "-")
    probe = f"{RUNNER} -m rerun run {seeds} hydra.sweep.dir=$sweep || exit 125; {RUNNER} verdict run_good $sweep"
    subject, _ = first_bad_commit(tmp_path, f"sweep=run_$(git rev-parse HEAD); {probe}", "HEAD~7")
    assert subject == "commit 6"


def test_verify_and_verdict_exit_with_125_if_they_cannot_tell(run_here: Any):
    run_here(*SMALL, "model=mlp", "hydra.run.dir=run", code=0)
    assert run_here("verify", "run", "model.module.no_such_key=1", code=125).err.startswith("error: ")
    assert "no such folder" in run_here("verify", "missing", code=125).err
    assert "is a single setting" in run_here("verdict", "run", code=125).err
    assert run_here("check", "model=missing", code=2).err
