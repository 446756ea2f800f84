"""Sweeps that are ended by a signal: no job is lost, and the same command trains the missing batches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from main_runs import query
from python_process import PATIENCE, run_python, start_python, wait_until
from sweep_runs import LOGGED, OWN, QUIET, batches, six, statuses, sweeps

LATE = """
import os
import signal
import time
from pathlib import Path

from runner.distributed.session import end

if signal.getsignal(signal.SIGTERM) is end:  # in a job that has no folder yet
    Path(f"late-{os.getpid()}").touch()
    deadline = time.monotonic() + 200
    while not Path("go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the user's `own.py`."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.mark.slow
def test_after_sigkill_only_missing_batches_are_trained_in_the_same_runs(folder: Path, run_app: Any):
    command = ("-m", "seed=0,1,2", "+callbacks.own.ends=SIGKILL", "callbacks.mlflow_logger.nested=true", *LOGGED)
    run_app(*command, exit_code=-signal.SIGKILL)
    (sweep,) = sweeps(folder)
    assert statuses(sweep) == {"seed0-mlp-digits": "FINISHED", "seed1-mlp-digits": "RUNNING"}
    assert len(batches(folder)) == 6 + 5
    run_app(*command)
    assert batches(folder) == [*(f"seed1-mlp-digits {batch}" for batch in (3, 4, 5)), *six("seed2-mlp-digits")]
    runs = query(folder, "select name, status from runs order by name")
    names = [*(f"seed{seed}-mlp-digits" for seed in range(3)), "sweep-seed-mlp-digits"]
    assert runs == [(name, "FINISHED") for name in names]
    points = query(folder, "select run_uuid, step from metrics where key = 'loss/train/total'")
    assert len(points) == 18 == len({*points})
    parents = query(folder, "select value from tags where key = 'mlflow.parentRunId'")
    assert parents == query(folder, "select run_uuid from runs where name = 'sweep-seed-mlp-digits'") * 3
    assert query(folder, "select value from tags where key = 'best.setting'") != []
    artifacts = {path.name for path in (folder / "outputs" / "mlartifacts").glob("*/artifacts/sweep/*")}
    assert artifacts == {"settings.csv", "jobs.csv", "results.json", "report.html", "report.svg", "report.png"}


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until a condition holds; the test fails if the process ends before."""
    wait_until(lambda: process.poll() is not None or condition())
    assert process.poll() is None, process.communicate()


@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGINT, ()),
        pytest.param(signal.SIGTERM, ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, ("hydra/launcher=submitit_local",), marks=pytest.mark.slow),
    ],
    ids=["SIGINT-basic", "SIGTERM-joblib", "SIGTERM-submitit"],
)
def test_a_signal_ends_a_sweep_that_continues_from_its_checkpoints(
    folder: Path, number: int, launcher: tuple[str, ...]
):
    program = """
import os, sys
from runner.__main__ import main
code = main()
print("leader", code, "torch" in sys.modules, flush=True)
os._exit(code)
"""
    command = ["-c", program, "-m", "seed=0,1,2", *launcher, "+callbacks.own.seconds=4", *QUIET]
    streams = {name: (folder / name).open("w+") for name in ("stdout", "stderr")}
    with contextlib.ExitStack() as stack:
        for stream in streams.values():
            stack.enter_context(stream)
        leader = start_python(command, real=bool(launcher), cwd=folder, start_new_session=True, **streams)
        stack.enter_context(leader)
        try:
            file = folder / "batches.txt"
            wait_until(lambda: leader.poll() is not None or (file.exists() and len(file.read_text().split("\n")) > 8))
            os.killpg(leader.pid, number) if number == signal.SIGINT else leader.send_signal(number)
            leader.wait(PATIENCE)
        finally:
            if leader.poll() is None:
                os.killpg(leader.pid, signal.SIGKILL)
    out, err = ((folder / name).read_text() for name in streams)
    assert leader.returncode == 128 + number, err
    # With a launcher, the leader only waits, without torch.
    assert " killed" in out and f"leader {128 + number} {not launcher}" in out
    (sweep,) = sweeps(folder)
    names = [f"seed{seed}-mlp-digits" for seed in range(3)]
    assert "KILLED" in statuses(sweep).values() and "RUNNING" not in statuses(sweep).values()
    (folder / "interrupted").touch()
    run_python(command, cwd=folder, check=True)
    assert sorted(batches(folder)) == sorted(six(*names))  # no batch is trained twice
    assert statuses(sweep) == dict.fromkeys(names, "FINISHED")


@pytest.mark.slow
@pytest.mark.parametrize("is_continued", [False, True])
def test_a_signal_ends_jobs_that_are_starting(folder: Path, run_here: Any, is_continued: bool):
    """The sweep cannot find these jobs by their locks yet, so each job checks whether the sweep was stopped."""
    command = ("-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *QUIET)
    if is_continued:
        assert run_here("-m", "seed=0,1", "+callbacks.own.ends=error", *QUIET).code == 1
        command = (*command, "+callbacks.own.ends=error")
        batches(folder)
    (folder / "own.py").write_text(LATE + OWN)
    program = [sys.executable, "-m", "runner", *command]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, cwd=folder, **streams, text=True, start_new_session=True) as leader:
        try:
            wait_for(lambda: len([*folder.glob("late-*")]) == 2, leader)
            leader.send_signal(signal.SIGTERM)
            wait_for(lambda: any(folder.glob("outputs/sweeps/*/*/.stop")), leader)
            (folder / "go").touch()
            _, err = leader.communicate(timeout=PATIENCE)
        finally:
            if leader.poll() is None:
                os.killpg(leader.pid, signal.SIGKILL)
    assert leader.returncode == 128 + signal.SIGTERM, err
    assert batches(folder) == []
