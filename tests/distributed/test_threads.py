"""The number of CPU threads of each process, so that ranks and parallel jobs share the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from runner.distributed.threads import (
    Threads,
    choose_threads,
    cores,
    parallel_jobs,
    use_one_thread,
    use_threads,
    with_threads,
)


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes settings for threads from the environment."""
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def share(processes: int) -> int:
    """Return how many cores each process gets of those that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "50000"),
        pytest.param({"GOMP_SPINCOUNT": "5"}, "5", marks=pytest.mark.slow),
        pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, "None", marks=pytest.mark.slow),
    ],
)
def test_idle_threads_sleep_soon_unless_the_user_sets_how_they_wait(own: dict[str, str], expected: str, tmp_path: Path):
    """The variable must be set before torch is imported, because torch reads it only then."""
    program = """
import os, sys
from runner.__main__ import command

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is imported with", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
command()
"""
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", program, "check", "model=mlp", "callbacks=none"]
    process = subprocess.run(command, cwd=tmp_path, env=env | own, capture_output=True, text=True, check=True)
    assert process.stdout.count("torch is imported with") == 1
    assert f"torch is imported with {expected}\n" in process.stdout


def test_cores_counts_only_cores_that_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cores_are_shared_by_ranks_and_by_jobs():
    assert choose_threads(None, processes=2, jobs=1) == Threads(share(2))
    assert choose_threads(None, processes=1, jobs=2) == Threads(share(2))
    assert choose_threads(None, processes=2, jobs=2) == Threads(share(4))
    assert choose_threads(None, processes=10_000, jobs=1) == Threads(1)


def test_a_single_process_keeps_torchs_default():
    assert choose_threads(None, processes=1, jobs=1) == Threads(None, is_requested=False)


def test_a_requested_number_takes_precedence_over_omp_num_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(7, processes=1, jobs=1) == Threads(7, is_requested=True)
    assert choose_threads(7, processes=4, jobs=4) == Threads(7, is_requested=True)


def test_the_users_omp_num_threads_takes_precedence_over_sharing(monkeypatch: pytest.MonkeyPatch):
    for value in ("1", "10000", "4,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert choose_threads(None, processes=2, jobs=1) == Threads(None, is_requested=True)


def test_sharing_replaces_the_default_that_torchrun_sets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert choose_threads(None, processes=2, jobs=1) == Threads(share(2))
    monkeypatch.setenv("OMP_NUM_THREADS", "10000")
    assert choose_threads(None, processes=2, jobs=1) == Threads(None, is_requested=True)


def test_the_cores_that_joblib_gives_a_job_are_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(share(2)))
    assert choose_threads(None, processes=2, jobs=2) == Threads(share(4))


def test_parallel_jobs_counts_the_jobs_that_a_launcher_runs_at_once(tmp_path: Path):
    def jobs(launcher: str, **settings: object) -> int:
        target = f"hydra_plugins.somewhere.{launcher}"
        return parallel_jobs(OmegaConf.create({"launcher": {"_target_": target, **settings}}))

    assert jobs("BasicLauncher") == 1
    assert jobs("JoblibLauncher", n_jobs=3) == 3
    assert jobs("JoblibLauncher", n_jobs=-1) == cores()
    assert jobs("JoblibLauncher", n_jobs=-2) == max(1, cores() - 1)
    assert jobs("SlurmLauncher", submitit_folder=str(tmp_path / "%j")) == 1

    for number in range(3):
        (tmp_path / str(number)).mkdir()
    assert jobs("LocalLauncher", submitit_folder=str(tmp_path / "%j")) == 3
    (tmp_path / "0" / "0_0_result.pkl").touch()
    assert jobs("LocalLauncher", submitit_folder=str(tmp_path / "%j")) == 2


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_with_threads_restores_the_number_of_threads():
    with pytest.raises(KeyError), with_threads(4, is_requested=True):
        assert torch.get_num_threads() == 4
        raise KeyError
    assert torch.get_num_threads() == 3
    with with_threads(None, is_requested=False):
        assert torch.get_num_threads() == 3
        use_one_thread()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_use_one_thread_only_lowers_a_number_that_was_not_requested():
    use_one_thread()  # outside a job
    assert torch.get_num_threads() == 3
    with with_threads(2, is_requested=True):
        use_one_thread()
        assert torch.get_num_threads() == 2
    with with_threads(None, is_requested=False):
        use_threads(2)  # as if the user had asked for two
        use_one_thread()
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 3
