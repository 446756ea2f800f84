"""Slurm jobs: ranks from environment variables, values kept across requeues, and signals.

`test_slurm_cluster.py` tests the same with a real Slurm.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from main_runs import OWN, SHORT

from runner.distributed import slurm
from runner.distributed.environment import keep_across_restarts
from runner.distributed.launch import Launch
from runner.distributed.session import ending, requeued_by_signals
from runner.failures.errors import Requeued, SessionOver

TASK = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "MASTER_ADDR": "10.0.0.1",
}
RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Replaces the environment variables of a job."""

    def change(variables: dict[str, str]) -> None:
        for name in [*RANK, *(key for key in os.environ if key.startswith(("SLURM_", "SUBMITIT_")))]:
            monkeypatch.setenv(name, "")  # so that monkeypatch removes a value that the product sets
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(slurm, "_memory", None)  # as in a new process

    return change


@pytest.mark.parametrize(
    "text, counts", [("1", [1]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3])]
)
def test_tasks_per_node_parses_groups_of_nodes(text: str, counts: list[int]):
    assert slurm.tasks_per_node(text) == counts


def test_each_task_of_a_step_with_several_is_a_rank(environ: Any):
    environ(TASK)
    assert slurm.use_tasks_as_ranks()
    port = os.environ["MASTER_PORT"]
    assert [os.environ[name] for name in RANK] == ["4", "0", "5", "1", "10.0.0.1", port]
    environ({**TASK, "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert slurm.use_tasks_as_ranks()
    assert [os.environ[name] for name in RANK] == ["1", "1", "5", "2", "10.0.0.1", port]
    environ({**TASK, "SLURM_RESTART_COUNT": "1"})
    assert slurm.use_tasks_as_ranks()
    assert os.environ["MASTER_PORT"] != port, "the previous attempt may still hold its port"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, "RANK": "3"},
        {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "5", "SLURM_PROCID": "0"},
    ],
    ids=["no job", "one task", "a rank of torchrun", "the batch script of five tasks"],
)
def test_processes_that_are_not_tasks_of_several_do_not_become_ranks(variables: dict[str, str], environ: Any):
    environ(variables)
    before = os.environ.get("RANK")
    assert not slurm.use_tasks_as_ranks()
    assert os.environ.get("RANK") == before


def test_a_requeued_job_keeps_values_of_earlier_attempts(environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    job = {"SLURM_JOB_ID": "71"}
    environ(job)
    assert keep_across_restarts("folder", lambda: "first") == "first"
    assert keep_across_restarts("folder", lambda: "second") == "first"
    environ({**job, "SLURM_RESTART_COUNT": "1"})
    assert keep_across_restarts("folder", lambda: "third") == "first"
    assert keep_across_restarts("other", lambda: "fourth") == "fourth"
    environ({**job, "SLURM_RESTART_COUNT": "2"})
    assert keep_across_restarts("other", lambda: "fifth") == "fourth"


def test_other_jobs_and_commands_do_not_get_the_kept_values(
    environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    environ({"SLURM_JOB_ID": "71"})
    assert keep_across_restarts("folder", lambda: "mine") == "mine"
    environ({"SLURM_JOB_ID": "72", "SLURM_RESTART_COUNT": "1"})
    assert keep_across_restarts("folder", lambda: "another job's") == "another job's"
    environ({"SLURM_JOB_ID": "71"})  # the same command again in the same attempt is a new run
    assert keep_across_restarts("folder", lambda: "a later run's") == "a later run's"
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "runner", "seed=1"])
    environ({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "1"})
    assert keep_across_restarts("folder", lambda: "another command's") == "another command's"


def test_outside_of_slurm_no_values_are_written(environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    environ({})
    assert keep_across_restarts("folder", lambda: "once") == "once"
    assert keep_across_restarts("folder", lambda: "twice") == "twice"
    slurm.check_progress(trained=False)
    assert not [*tmp_path.iterdir()]


def test_a_job_without_progress_in_three_attempts_is_not_requeued(
    environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    def attempt(number: int, saved: bool) -> None:
        environ({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": str(number)})
        slurm.check_progress(saved)

    for number, saved in enumerate([False, False, True, False, False]):
        attempt(number, saved)
    with pytest.raises(RuntimeError, match="3 attempts in a row made no progress"):
        attempt(5, saved=False)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_schedulers_requeue_a_job_if_requested(number: signal.Signals):
    original = signal.signal(number, lambda *_: None)  # submitit's handler, which would requeue immediately
    try:
        handler = signal.getsignal(number)
        with requeued_by_signals(True):
            assert signal.getsignal(number) == signal.SIG_DFL, "a Trainer only handles signals without a handler"
            assert type(ending(number)) is Requeued
            assert type(ending(signal.SIGTERM)) is SystemExit
        assert signal.getsignal(number) is handler
        with requeued_by_signals(False):
            assert signal.getsignal(number) is handler
            assert ending(number).args == (128 + number,)
        assert not isinstance(ending(number), SessionOver)
    finally:
        signal.signal(number, original)


@pytest.mark.parametrize(
    "requeue, variables, requeues",
    [
        (None, {}, False),
        (None, {"SLURM_JOB_ID": "1"}, False),
        (None, {"SLURM_JOB_ID": "1", "SUBMITIT_EXECUTOR": "slurm"}, True),
        (None, {"SUBMITIT_EXECUTOR": "local"}, False),
        (True, {}, False),
        (True, {"SLURM_JOB_ID": "1"}, True),
        (False, {"SLURM_JOB_ID": "1", "SUBMITIT_EXECUTOR": "slurm"}, False),
    ],
)
def test_jobs_of_submitit_on_slurm_are_requeued_by_default(
    requeue: bool | None, variables: dict[str, str], requeues: bool, environ: Any
):
    environ(variables)
    assert Launch(requeue=requeue).requeues is requeues


@pytest.mark.parametrize(("variables", "times"), [({}, 1), ({"SLURM_JOB_ID": "1"}, 0)])
def test_requeue_warns_that_it_has_no_effect_outside_slurm(
    variables: dict[str, str], times: int, environ: Any, run_here: Any
):
    environ(variables)
    finished = run_here(*SHORT, "callbacks=none", "launch.requeue=true", code=0)
    assert finished.err.count("WARNING: launch.requeue=true: has no effect outside Slurm") == times


def test_an_invalid_requeue_is_refused():
    with pytest.raises(ValueError, match="requeue='yes': must be True, False, or None"):
        Launch(requeue="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_attempt_of_a_job_keeps_its_output_in_a_log(ranks: int, run_app: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    job: dict[str, str | None] = {"SLURM_JOB_ID": "71"}
    command = (*SHORT, "callbacks=[checkpoint_saver,console_summary]", "hydra.run.dir=run")
    launch = f"launch.nproc_per_node={ranks}"
    failed = run_app(*command, launch, "+callbacks.failing._target_=own.Failing", env=job, exit_code=1)
    resume = ("resume", "run", *command, launch)
    run_app(*resume, "trainer.max_duration=1ep", env=job)
    finished = run_app(*resume, env=job)
    logs = [(tmp_path / "run" / attempt / "console.log").read_text() for attempt in ("attempts/1", "attempts/2", ".")]
    assert "RuntimeError: a callback that fails" in logs[0] and "RuntimeError: a callback that fails" in failed.stderr
    assert ["trained  1 epochs" in logs[1], "trained  2 epochs" in logs[2]] == [False, True]
    assert "trained" in logs[1] and logs[2].splitlines()[-1] in finished.stdout


def test_outside_of_slurm_a_run_keeps_no_log(run_app: Any, tmp_path: Path):
    run_app(*SHORT, "callbacks=[checkpoint_saver]", "hydra.run.dir=run")
    assert not (tmp_path / "run" / "console.log").exists()
