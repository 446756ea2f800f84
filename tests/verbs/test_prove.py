"""`runner prove`: it kills and resumes an experiment, and tells whether the results equal those without kills."""

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

BATCHES = 120  # 12 per epoch
SMALL = ("prove", "model=mlp", "data.batch_size=100", f"--batches={BATCHES}", "hydra.run.dir=proof")

OWN = '''
"""Code of a user."""
import os

from runner import Algorithm


class Unsaved(Algorithm):
    """Scales gradients by a count that it does not save."""

    def __init__(self) -> None:
        self.batches = 0

    def after_train_batch(self, state, logger):
        self.batches += 1
        for weight in state.model.parameters():
            weight.grad.mul_(1 + self.batches)


class Random(Algorithm):
    """Scales the gradients of one batch by a random number without a seed."""

    def after_train_batch(self, state, logger):
        if state.timestamp.batch == 6:  # the seventh
            for weight in state.model.parameters():
                weight.grad.mul_(1 + int.from_bytes(os.urandom(2), "little"))


class NotResumable(Algorithm):
    """Fails when training resumes."""

    def fit_start(self, state, logger):
        if state.timestamp.batch:
            raise RuntimeError("it was trained before")
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A working directory with the user's classes and their configs."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "mine" / "algorithms").mkdir(parents=True)
    for key, name in (("unsaved", "Unsaved"), ("random", "Random"), ("not_resumable", "NotResumable")):
        (tmp_path / "mine" / "algorithms" / f"{key}.yaml").write_text(f"{key}:\n  _target_: own.{name}\n")
    return tmp_path


def read_verdict(folder: Path) -> dict[str, Any]:
    """Return the content of `prove.json`."""
    return json.loads((folder / "proof" / "prove.json").read_text())


@pytest.mark.slow
def test_an_experiment_that_resumes_bit_for_bit_is_proved_equal(tmp_path: Path, run_app: Any):
    run_app(*SMALL, "model.module.dropout=0.3", "+algorithms=[mixup,ema]", "--kills=3", "--keep")
    proof, verdict = tmp_path / "proof", read_verdict(tmp_path)
    assert verdict["outcome"] == "equal"
    assert verdict["reason"] == f"equal bit for bit: {BATCHES} batches, 3 final metrics, 3 kills"

    kills = verdict["kills"]
    assert len(kills) == 3 and {kill["moment"] for kill in kills} >= {IN_SAVE, START}
    assert any(0 < kill["resumed_from"] < BATCHES for kill in kills)
    # The log has the command of each session, and sessions that started to train left a record.
    log = (proof / "killed.log").read_text()
    assert log.count("$ python -m runner") == 4 and log.count("runner resume ") >= 2
    assert len(list((proof / "killed" / "sessions").iterdir())) >= 2
    assert list((proof / "killed" / "checkpoints").glob(".*")) == []  # the next session removes what a kill left
    assert (proof / "uninterrupted.log").read_text().count("$ python -m runner") == 1
    assert json.loads((proof / "killed" / "result.json").read_text())["status"] == "FINISHED"

    whole, killed = (read_digests(proof / run) for run in ("uninterrupted", "killed"))
    assert whole == killed and [line["batch"] for line in whole] == [*range(1, BATCHES + 1)]
    assert set(whole[0]) == {"epoch", "batch", "values", *PARTS} and len({line["weights"] for line in whole}) == BATCHES
    assert {path.name for path in tmp_path.iterdir()} == {"proof"}  # no MLflow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "outcome", "reasons"),
    [
        ("unsaved", "different", ("in gradients, weights, optimizer; equal bit for bit up to batch", "after kill 1")),
        ("random", "not deterministic", ("at batch 7, in gradients, weights, optimizer", "uninterrupted")),
        ("not_resumable", "not resumed", ("after kill 1", "RuntimeError: it was trained before")),
    ],
)
def test_failed_proofs_name_the_reason(own: Path, run_app: Any, algorithm: str, outcome: str, reasons: tuple[str, ...]):
    arguments = ("--config-dir", "mine", *SMALL, f"+algorithms={algorithm}", "--kills=1", "--seed=3")
    finished = run_app(*arguments, exit_code=1)
    verdict = read_verdict(own)
    assert verdict["outcome"] == outcome and outcome in finished.stdout
    assert all(reason in verdict["reason"] for reason in reasons), verdict["reason"]
    (kill,) = verdict["kills"]
    assert kill["moment"] == IN_SAVE and kill["resumed_from"] > 0
    if outcome == "different":
        first = kill["resumed_from"] + 1
        assert f"at batch {first}, in gradients, weights" in verdict["reason"]
    command = parse(shlex.split(verdict["command"])[3:])  # after `python -m runner`
    assert command.verb == "prove" and f"+algorithms={algorithm}" in command.overrides
    assert (command.options["kills"], command.options["seed"]) == (1, 3)
    assert "kept: proof" in finished.stdout and finished.stderr == ""


@pytest.mark.slow
def test_an_experiment_on_two_ranks_is_proved_equal(tmp_path: Path, run_app: Any):
    ranks = ("launch.nproc_per_node=2", "launch.threads=1", "--kills=3", "--seed=1")
    # `prove` reads RANK from the environments of processes; those of forked ones are that of the fork server.
    finished = run_app(*SMALL, *ranks, "+algorithms=[mixup]", "--keep", real=True, timeout=290)
    verdict = read_verdict(tmp_path)
    assert verdict["outcome"] == "equal" and "ok proof" in finished.stdout
    assert {kill["rank"] for kill in verdict["kills"]} == {0, 1}
    assert json.loads((tmp_path / "proof" / "killed" / "environment.json").read_text())["ranks"] == 2
    assert "SIGKILL" in (tmp_path / "proof" / "killed.log").read_text()  # rank 0 reports how rank 1 ended


@pytest.mark.slow
def test_three_ranks_need_deterministic_training(tmp_path: Path, run_app: Any):
    ranks = (*SMALL, "launch.nproc_per_node=3", "launch.threads=1", "--kills=1", "--seed=3")
    finished = run_app(*ranks, exit_code=1)
    assert read_verdict(tmp_path)["outcome"] == "different"
    assert "need trainer.deterministic=true" in " ".join(finished.stdout.split())
    run_app(*ranks, "trainer.deterministic=true", "hydra.run.dir=again")


@pytest.mark.slow
def test_a_successful_proof_removes_its_folder_and_names_its_gaps(tmp_path: Path, run_app: Any):
    output = run_app(*SMALL, "--batches=12", "--kills=1", "--save-interval=1ba").stdout
    assert "ok proof" in output and "12 batches, " in output
    assert "no epoch ended before the last of 12 batches" in output and "resumed within an epoch" not in output
    output = run_app(*SMALL, "--batches=48", "--kills=1", "--save-interval=12ba").stdout
    assert "ok proof" in output and "no run resumed within an epoch" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_no_process_outlives_the_command(tmp_path: Path, number: int):
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
        for process in (prover, *started):
            if not isinstance(process, psutil.Process) or process.is_running():
                process.kill()
        prover.wait()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["callbacks=[early_stopper]", "callbacks.early_stopper.monitor=nothing"], "nothing"),
        (["-m", "seed=0,1"], "takes one experiment at a time"),
    ],
    ids=str,
)
def test_a_wrong_experiment_is_refused_without_a_folder(tmp_path: Path, run_app: Any, arguments: list[str], part: str):
    error = run_app(*SMALL, *arguments, exit_code=2).stderr
    assert part in error and "Traceback" not in error
    assert not (tmp_path / "proof").exists()


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, run_here: Any):
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "mine").write_text("kept")
    assert "is not empty" in run_here(*SMALL, code=2).err
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
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str):
    check(Command.of("prove"), small_experiment())
    with pytest.raises(ValueError) as raised:
        check(Command.of("prove", **options), small_experiment())
    assert str(raised.value).startswith(message)


def test_a_callback_of_the_user_can_be_omitted():
    check(Command.of("prove", without=("mine",)), small_experiment(callbacks={"mine": {"_target_": "own.Mine"}}))


def test_prove_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="without torchrun"):
        check(Command.of("prove"), small_experiment())
