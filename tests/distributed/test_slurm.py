"""The environment of a Slurm job, and its memory of earlier attempts; `test_slurm_cluster.py` has a real Slurm."""

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
    """Sets the environment of a job, in place of that of an earlier one."""

    def change(variables: dict[str, str]) -> None:
        for name in [*RANK, *(one for one in os.environ if one.startswith(("SLURM_", "SUBMITIT_")))]:
            monkeypatch.setenv(name, "")  # so that what the product sets is gone after the test
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(slurm, "_memory", None)  # as in a new process

    return change


@pytest.mark.parametrize(
    "text, counts", [("1", [1]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3])]
)
def test_tasks_per_node_are_written_in_groups(text: str, counts: list[int]):
    assert slurm.tasks_per_node(text) == counts


def test_a_task_of_several_is_a_rank(environ: Any):
    environ(TASK)
    assert slurm.use_tasks_as_ranks()
    port = os.environ["MASTER_PORT"]
    assert [os.environ[one] for one in RANK] == ["4", "0", "5", "1", "10.0.0.1", port]
    environ({**TASK, "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert slurm.use_tasks_as_ranks()
    assert [os.environ[one] for one in RANK] == ["1", "1", "5", "2", "10.0.0.1", port]
    environ({**TASK, "SLURM_RESTART_COUNT": "1"})
    assert slurm.use_tasks_as_ranks()
    assert os.environ["MASTER_PORT"] != port, "what is left of the attempt before may still hold its port"


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
def test_other_processes_stay_what_they_are(variables: dict[str, str], environ: Any):
    environ(variables)
    before = os.environ.get("RANK")
    assert not slurm.use_tasks_as_ranks()
    assert os.environ.get("RANK") == before


def test_a_job_that_runs_again_remembers(environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_other_jobs_and_commands_remember_nothing_of_it(environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    environ({"SLURM_JOB_ID": "71"})
    assert keep_across_restarts("folder", lambda: "mine") == "mine"
    environ({"SLURM_JOB_ID": "72", "SLURM_RESTART_COUNT": "1"})
    assert keep_across_restarts("folder", lambda: "another job's") == "another job's"
    environ({"SLURM_JOB_ID": "71"})  # the same command again in the same attempt is a run of its own
    assert keep_across_restarts("folder", lambda: "a later run's") == "a later run's"
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "runner", "seed=1"])
    environ({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "1"})
    assert keep_across_restarts("folder", lambda: "another command's") == "another command's"


def test_outside_of_slurm_nothing_is_written(environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    environ({})
    assert keep_across_restarts("folder", lambda: "once") == "once"
    assert keep_across_restarts("folder", lambda: "twice") == "twice"
    slurm.check_progress(trained=False)
    assert not [*tmp_path.iterdir()]


def test_a_job_that_never_saves_is_not_requeued_again(environ: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def attempt(number: int, saved: bool) -> None:
        environ({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": str(number)})
        slurm.check_progress(saved)

    for number, saved in enumerate([False, False, True, False, False]):
        attempt(number, saved)
    with pytest.raises(RuntimeError, match="3 attempts in a row trained no further"):
        attempt(5, saved=False)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_schedulers_requeue_where_that_is_asked_for(number: signal.Signals):
    submitit = signal.signal(number, lambda *_: None)  # its handler requeues at once
    try:
        theirs = signal.getsignal(number)
        with requeued_by_signals(True):
            assert signal.getsignal(number) == signal.SIG_DFL, "a Trainer takes signals that nobody else handles"
            assert type(ending(number)) is Requeued
            assert type(ending(signal.SIGTERM)) is SystemExit
        assert signal.getsignal(number) is theirs
        with requeued_by_signals(False):
            assert signal.getsignal(number) is theirs
            assert ending(number).args == (128 + number,)
        assert not isinstance(ending(number), SessionOver)
    finally:
        signal.signal(number, submitit)


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
def test_what_is_requeued(requeue: bool | None, variables: dict[str, str], requeues: bool, environ: Any):
    environ(variables)
    assert Launch(requeue=requeue).requeues is requeues


@pytest.mark.parametrize(("variables", "times"), [({}, 1), ({"SLURM_JOB_ID": "1"}, 0)])
def test_outside_slurm_a_run_warns_that_nothing_requeues_it(
    variables: dict[str, str], times: int, environ: Any, run_here: Any
):
    environ(variables)
    ended = run_here(*SHORT, "callbacks=none", "launch.requeue=true", code=0)
    assert ended.err.count("WARNING: launch.requeue=true: has no effect outside Slurm") == times


def test_requeue_is_checked():
    with pytest.raises(ValueError, match="requeue='yes': must be True, False, or None"):
        Launch(requeue="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_attempt_of_a_job_keeps_what_it_printed(ranks: int, run_app: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    job: dict[str, str | None] = {"SLURM_JOB_ID": "71"}
    command = (*SHORT, "callbacks=[checkpoint_saver,console_summary]", "hydra.run.dir=run")
    launch = f"launch.nproc_per_node={ranks}"
    failed = run_app(*command, launch, "+callbacks.failing._target_=own.Failing", env=job, exit_code=1)
    goes_on = ("resume", "run", *command, launch)
    run_app(*goes_on, "trainer.max_duration=1ep", env=job)
    done = run_app(*goes_on, env=job)
    logs = [(tmp_path / "run" / one / "console.log").read_text() for one in ("attempts/1", "attempts/2", ".")]
    assert "RuntimeError: a callback that fails" in logs[0] and "RuntimeError: a callback that fails" in failed.stderr
    assert ["trained  1 epochs" in logs[1], "trained  2 epochs" in logs[2]] == [False, True]
    assert "trained" in logs[1] and logs[2].splitlines()[-1] in done.stdout


def test_outside_of_slurm_a_run_keeps_no_log(run_app: Any, tmp_path: Path):
    run_app(*SHORT, "callbacks=[checkpoint_saver]", "hydra.run.dir=run")
    assert not (tmp_path / "run" / "console.log").exists()
