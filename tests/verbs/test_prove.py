"""An experiment is killed and resumed for real, and the verdict is right about those that keep their promise or not."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from composed_configs import small_experiment
from python_process import PATIENCE, start_python

from runner.checkpoints.digest import PARTS, read_digests
from runner.cli.command import Command, parse
from runner.trials.kills import IN_SAVE, START
from runner.verbs.prove import check

BATCHES = 120  # 12 an epoch
SMALL = ("prove", "model=mlp", "data.batch_size=100", f"--batches={BATCHES}", "hydra.run.dir=proof")

OWN = '''
"""Code of a user."""
import os

from runner import Algorithm


class Forgetful(Algorithm):
    """Scales gradients by what it does not save."""

    def __init__(self) -> None:
        self.batches = 0

    def after_train_batch(self, state, logger):
        self.batches += 1
        for one in state.model.parameters():
            one.grad.mul_(1 + self.batches)


class Chance(Algorithm):
    """Scales the gradients of one batch by what differs from run to run."""

    def after_train_batch(self, state, logger):
        if state.timestamp.batch == 6:  # the seventh
            for one in state.model.parameters():
                one.grad.mul_(1 + int.from_bytes(os.urandom(2), "little"))


class OnlyOnce(Algorithm):
    """Refuses to go on."""

    def fit_start(self, state, logger):
        if state.timestamp.batch:
            raise RuntimeError("it was trained before")
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A working directory with the user's classes and their configs."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "mine" / "algorithms").mkdir(parents=True)
    for key, name in (("forgetful", "Forgetful"), ("chance", "Chance"), ("only_once", "OnlyOnce")):
        (tmp_path / "mine" / "algorithms" / f"{key}.yaml").write_text(f"{key}:\n  _target_: own.{name}\n")
    return tmp_path


def verdict_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "proof" / "prove.json").read_text())


@pytest.mark.slow
def test_an_experiment_that_resumes_to_the_bit_is_found_equal(tmp_path: Path, run_app: Any):
    run_app(*SMALL, "model.module.dropout=0.3", "+algorithms=[mixup,ema]", "--kills=3", "--keep")
    proof, found = tmp_path / "proof", verdict_of(tmp_path)
    assert found["outcome"] == "equal"
    assert found["reason"] == f"equal bit for bit: {BATCHES} batches, 3 final metrics, 3 kills"

    kills = found["kills"]
    assert len(kills) == 3 and {one["moment"] for one in kills} >= {IN_SAVE, START}
    assert any(0 < one["resumed_from"] < BATCHES for one in kills)
    # What happened, told by others: each session has said what it was, and those that began to train left a record.
    printed = (proof / "killed.log").read_text()
    assert printed.count("$ python -m runner") == 4 and printed.count("runner resume ") >= 2
    assert len(list((proof / "killed" / "sessions").iterdir())) >= 2
    assert list((proof / "killed" / "checkpoints").glob(".*")) == []  # cleaned up by the session after it
    assert (proof / "uninterrupted.log").read_text().count("$ python -m runner") == 1
    assert json.loads((proof / "killed" / "result.json").read_text())["status"] == "FINISHED"

    whole, killed = (read_digests(proof / run) for run in ("uninterrupted", "killed"))
    assert whole == killed and [one["batch"] for one in whole] == [*range(1, BATCHES + 1)]
    assert set(whole[0]) == {"epoch", "batch", "values", *PARTS} and len({one["weights"] for one in whole}) == BATCHES
    assert {path.name for path in tmp_path.iterdir()} == {"proof"}  # no MLflow


@pytest.mark.parametrize(
    ("algorithm", "outcome", "reasons"),
    [
        pytest.param(
            *(
                "forgetful",
                "different",
                ("in gradients, weights, optimizer; equal bit for bit up to batch", "after kill 1"),
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("chance", "not deterministic", ("at batch 7, in gradients, weights, optimizer", "uninterrupted")),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("only_once", "not resumed", ("after kill 1", "RuntimeError: it was trained before")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_does_not_is_found_out(own: Path, run_app: Any, algorithm: str, outcome: str, reasons: tuple[str, ...]):
    arguments = ("--config-dir", "mine", *SMALL, f"+algorithms={algorithm}", "--kills=1", "--seed=3")
    done = run_app(*arguments, exit_code=1)
    found = verdict_of(own)
    assert found["outcome"] == outcome and outcome in done.stdout
    assert all(one in found["reason"] for one in reasons), found["reason"]
    ((kill,)) = found["kills"]
    assert kill["moment"] == IN_SAVE and kill["resumed_from"] > 0
    if outcome == "different":
        assert (
            f"at batch {kill['resumed_from'] + 1}, in gradients, weights" in found["reason"]
        )  # the first after the resume
    again = parse(shlex.split(found["command"])[3:])  # of python -m runner
    assert again.verb == "prove" and f"+algorithms={algorithm}" in again.overrides
    assert (again.options["kills"], again.options["seed"]) == (1, 3)
    assert "kept: proof" in done.stdout and done.stderr == ""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, run_app: Any):
    ranks = ("launch.nproc_per_node=2", "launch.threads=1", "--kills=3", "--seed=1")
    done = run_app(*SMALL, *ranks, "+algorithms=[mixup]", "--keep", real=True, timeout=290)  # it looks for RANK=1
    found = verdict_of(tmp_path)
    assert found["outcome"] == "equal" and "ok proof" in done.stdout
    assert {one["rank"] for one in found["kills"]} == {0, 1}
    assert json.loads((tmp_path / "proof" / "killed" / "environment.json").read_text())["ranks"] == 2
    assert "SIGKILL" in (tmp_path / "proof" / "killed.log").read_text()  # rank 0 tells how rank 1 ended


@pytest.mark.slow
def test_three_ranks_are_told_what_they_need(tmp_path: Path, run_app: Any):
    ranks = (*SMALL, "launch.nproc_per_node=3", "launch.threads=1", "--kills=1", "--seed=3")
    done = run_app(*ranks, exit_code=1)
    assert verdict_of(tmp_path)["outcome"] == "different"
    assert "need trainer.deterministic=true" in " ".join(done.stdout.split())
    run_app(*ranks, "trainer.deterministic=true", "hydra.run.dir=again")


@pytest.mark.slow
def test_a_good_proof_leaves_nothing_and_says_what_it_does_not_cover(tmp_path: Path, run_app: Any):
    done = run_app(*SMALL, "--batches=12", "--kills=1", "--save-interval=1ba")
    assert "ok proof" in done.stdout and "12 batches, " in done.stdout
    assert "no epoch ended before the last of 12 batches" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_process_outlives_it(tmp_path: Path, number: int):
    command = ["-m", "runner", *SMALL, "--batches=100000", "launch.nproc_per_node=2"]
    prover = start_python(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + PATIENCE
        while len(started) < 2 or not (tmp_path / "proof" / "uninterrupted" / "digests.jsonl").exists():
            assert time.monotonic() < deadline and prover.poll() is None
            started = psutil.Process(prover.pid).children(recursive=True)
            time.sleep(0.05)
        os.kill(prover.pid, number)
        assert prover.wait(PATIENCE) == (130 if number == signal.SIGINT else -signal.SIGKILL)
        gone, alive = psutil.wait_procs(started, PATIENCE)
        assert len(gone) >= 2 and not alive
        assert (tmp_path / "proof").exists() == (number == signal.SIGKILL)
    finally:
        for one in (prover, *started):
            if not isinstance(one, psutil.Process) or one.is_running():
                one.kill()
        prover.wait()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["callbacks=[early_stopper]", "callbacks.early_stopper.monitor=nothing"], "nothing"),
        (["-m", "seed=0,1"], "takes one experiment at a time"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_message_and_leaves_nothing(tmp_path: Path, run_app: Any, arguments: list[str], part: str):
    done = run_app(*SMALL, *arguments, exit_code=2)
    assert part in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "proof").exists()


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path: Path, run_app: Any):
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "mine").write_text("kept")
    assert "holds something" in run_app(*SMALL, exit_code=2).stderr
    assert (tmp_path / "proof" / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kills": 0}, "--kills=0: must be a whole number of at least 1"),
        ({"batches": 1}, "--batches=1: must be a whole number of at least 2"),
        ({"seed": -1}, "--seed=-1: must be a whole number of at least 0"),
        ({"patience": 0}, "--patience=0: must be a whole number of at least 1"),
        ({"without": ("mlflow_loger",)}, "--without='mlflow_loger': no such callback; did you mean 'mlflow_logger'"),
    ],
    ids=str,
)
def test_what_is_asked_must_be_in_range(options: dict[str, Any], message: str):
    check(Command.of("prove"), small_experiment())
    with pytest.raises(ValueError) as raised:
        check(Command.of("prove", **options), small_experiment())
    assert str(raised.value).startswith(message)


def test_a_callback_of_the_users_own_may_be_omitted():
    check(Command.of("prove", without=("mine",)), small_experiment(callbacks={"mine": {"_target_": "own.Mine"}}))


def test_it_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="without torchrun"):
        check(Command.of("prove"), small_experiment())
