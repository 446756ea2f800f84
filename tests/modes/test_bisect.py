"""The commit that changed the bits of a run is found in a real repository, whatever else was committed around it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.modes.bisect import check_bisect, find_first, is_worse

SMALL = ("model=mlp", "data.batch_size=400", "trainer.max_duration=2ep", "callbacks=none", "algorithms=none")
OWN = """
from torch import nn

from runner import ClassificationModel


class Model(ClassificationModel):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)

    def forward(self, batch):
        return super().forward(batch)
"""
BAD = OWN.replace("super().forward(batch)", "super().forward(batch) * 1.001")


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, subject: str, content: str) -> str:
    (folder / "own.py").write_text(content)
    git(folder, "add", "own.py")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", subject)
    return git(folder, "rev-parse", "HEAD")


def start_with_a_run(folder: Path, run_app: Any, *arguments: str) -> None:
    """Make a repository of one commit, and train a run there."""
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("run\noutputs\n__pycache__\n")
    git(folder, "add", ".gitignore")
    commit(folder, "start", OWN)
    model = ("model._target_=own.Model", "~model.module", "~model.num_classes")
    run_app(*SMALL, *model, "hydra.run.dir=run", *arguments)


@pytest.fixture
def repository(tmp_path: Path, run_app: Any) -> Path:
    """A run of the first commit, and commits after it: comments, one that is broken, the change, and more comments."""
    start_with_a_run(tmp_path, run_app)
    for number in range(3):
        commit(tmp_path, f"comment {number}", f"# {number}\n{OWN}")
    commit(tmp_path, "broken", "this is no Python\n")
    commit(tmp_path, "the change", f"# the change\n{BAD}")
    for number in range(3, 6):
        commit(tmp_path, f"comment {number}", f"# {number}\n{BAD}")
    return tmp_path


def test_the_first_commit_that_changes_the_bits(repository: Path, run_app: Any):
    head = git(repository, "rev-parse", "HEAD")
    done = run_app("bisect", "run", "good=HEAD~8", "bad=HEAD", "batches=2")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    change, broken = (git(repository, "rev-parse", "--short=10", one) for one in ("HEAD~3", "HEAD~4"))
    assert f"skipped {broken} broken: does not run" in lines
    assert f"first {change} the change" in lines
    assert f"or one of 1 before it that do not run: {broken} broken" in lines
    assert any(line.startswith("different at batch 1, in loss, gradients") for line in lines)
    assert sum(line.startswith(("ok equal", f"different {change[:2]}", "different", "skipped")) for line in lines) <= 6
    assert git(repository, "worktree", "list").count("\n") == 0  # only the user's own
    assert git(repository, "status", "--short") == "" and git(repository, "rev-parse", "HEAD") == head


@pytest.mark.slow
def test_among_thirty_two_commits_six_probes_find_the_change(tmp_path: Path, run_app: Any):
    start_with_a_run(tmp_path, run_app)
    for number in range(32):
        broken = number in (14, 15, 20)
        commit(tmp_path, f"commit {number}", "no Python\n" if broken else f"# {number}\n{OWN if number < 21 else BAD}")
    done = run_app("bisect", "run", "good=HEAD~32", "bad=HEAD", "batches=2", "output=json", timeout=400.0)
    found = json.loads(done.stdout)["result"]
    assert (found["subject"], found["batch"], found["parts"][0]) == ("commit 21", 1, "loss")
    assert found["or"] == [git(tmp_path, "rev-parse", "HEAD~11")]  # commit 20
    probes = [line for line in done.stderr.splitlines() if line.startswith(("ok equal", "different", "skipped"))]
    assert len([line for line in probes if not line.startswith("skipped")]) <= 6


@pytest.mark.slow
def test_the_commit_that_worsens_a_metric_is_found_among_others_that_change_bits(tmp_path: Path, run_app: Any):
    start_with_a_run(tmp_path, run_app, "trainer.max_duration=10ep")
    harmless = OWN.replace("super().forward(batch)", "super().forward(batch) * 1.001")
    harmful = OWN.replace("super().forward(batch)", "super().forward(batch).detach() + super().forward(batch) * 0.01")
    commit(tmp_path, "harmless", harmless)
    commit(tmp_path, "broken", "no Python\n")
    commit(tmp_path, "harmful", harmful)
    commit(tmp_path, "a comment", f"# and no more\n{harmful}")
    by_metric = ("by=metric", "metric=eval/loss", "batches=2")
    done = run_app("bisect", "run", "good=HEAD~4", *by_metric, "output=json", timeout=400.0)
    found = json.loads(done.stdout)["result"]
    assert (found["subject"], found["batch"], found["parts"][0]) == ("harmful", 1, "loss")
    assert found["or"] == [git(tmp_path, "rev-parse", "HEAD~2")]
    same = run_app("bisect", "run", "good=HEAD~4", "bad=HEAD~3", *by_metric, exit_code=1, timeout=400.0)
    assert "is as good as" in same.stdout
    wrong = run_app("bisect", "run", "good=HEAD~4", "by=metric", "metric=eval/los", exit_code=2, timeout=400.0)
    assert "bisect.metric='eval/los': the run has no such metric; did you mean 'eval/loss'?" in wrong.stderr


def test_what_cannot_be_bisected_is_one_message(repository: Path, run_app: Any):
    for arguments, message in (
        (("good=HEAD",), "bisect.good='HEAD': is not an ancestor of bisect.bad=HEAD"),
        (("good=nowhere",), "bisect.good='nowhere': no such commit"),
        ((), "bisect.good='': must be a commit"),
        (("good=HEAD~4", "bad=HEAD~3", "batches=2"), "bisect.good='HEAD~4': the run cannot be trained there"),
    ):
        error = run_app("bisect", "run", *arguments, exit_code=2).stderr
        assert message in error and 'Traceback (most recent call last):\n  File "/tmp' not in error
    same = run_app("bisect", "run", "good=HEAD~8", "bad=HEAD~6", "batches=2", "output=json", exit_code=1)
    assert json.loads(same.stdout)["result"]["batch"] is None


@pytest.mark.parametrize("changed", [0, 1, 13, 30, 31])
@pytest.mark.parametrize("broken", [(), (7, 8, 15), (29,)])
def test_thirty_two_commits_take_few_probes(changed: int, broken: tuple[int, ...]):
    asked = []

    def differs(place: int) -> bool | None:
        asked.append(place)
        return None if place in broken else place >= changed

    first, unknown = find_first(32, differs)
    assert {first, *unknown} >= {changed} and first - changed <= len(broken)
    assert len(asked) == len({*asked}) <= 5 + len(broken)
    assert broken or (first, unknown) == (changed, [])


def test_worse_is_what_chance_does_not_explain():
    before = [0.10, 0.11, 0.12, 0.10, 0.13, 0.11]
    higher = [one + 0.02 for one in before]
    assert is_worse(before, higher, is_lower_better=True) == (True, "0.1117 -> 0.1317, p = 0.031")
    assert is_worse(before, higher, is_lower_better=False)[0] is False
    assert is_worse(before, [0.09, *higher[1:]], is_lower_better=True)[0] is False  # with a larger mean
    assert is_worse(before, before, is_lower_better=True)[0] is False
    lost = [*higher[1:], float("nan")]
    assert is_worse(before, lost, is_lower_better=True) == (True, "is not finite with 1 of 6 seeds")
    assert is_worse(lost, lost, is_lower_better=True)[0] is False


def test_the_keys_are_checked():
    asked = {"good": "a", "bad": "b", "by": "digests", "seeds": 6, "batches": 1, "patience": 1}
    check_bisect({"bisect": asked})
    for key, value in (("good", ""), ("bad", "--upload-pack=x"), ("batches", 0), ("seeds", 0), ("patience", 0)):
        with pytest.raises(ValueError, match=rf"bisect\.{key}={value!r}: must be"):
            check_bisect({"bisect": asked | {key: value}})
    with pytest.raises(ValueError, match=r"bisect\.seeds=5: too few runs per commit to decide"):
        check_bisect({"bisect": asked | {"by": "metric", "seeds": 5}})
