"""Jobs on one machine lease GPUs, so that no two jobs use the same one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from composed_configs import small_experiment
from omegaconf import OmegaConf
from python_process import start_python, wait_until

from runner.distributed import gpus
from runner.program.job import start_ranks

# Leases imaginary GPUs for one job after another, and writes the value of CUDA_VISIBLE_DEVICES for each job to a file.
HOLDER = """
import os, sys, time
from pathlib import Path
from runner.distributed import gpus

name, *jobs = sys.argv[1:]
for number, count in enumerate(jobs):
    with gpus.given_back():
        gpus.lease(int(count), Path(f"over-{name}").exists)
        Path(f"{name}-{number}.partial").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        os.rename(f"{name}-{number}.partial", f"{name}-{number}")
        while not Path(f"{name}-{number}-ends").exists():
            time.sleep(0.01)
"""


# Waits at the start of training until two jobs have started.
MEETS = """
import os, time
from pathlib import Path
from runner import Callback

class Meets(Callback):
    def fit_start(self, state, logger):
        Path("sees-" + os.environ["CUDA_VISIBLE_DEVICES"]).touch()
        deadline = time.monotonic() + 200
        while len([*Path().glob("sees-*")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
"""


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a process with a name whose jobs lease these numbers of GPUs, one job after another."""
    with contextlib.ExitStack() as stack:

        def start(name: str, *jobs: int, gpus: str = "0,1,2") -> Any:
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "TMPDIR": str(tmp_path)}
            with (tmp_path / f"{name}.err").open("wb") as err:
                process = start_python(["-c", HOLDER, name, *map(str, jobs)], cwd=tmp_path, env=env, stderr=err)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def sees(folder: Path, job: str) -> str:
    """Return the GPUs of a job, once it has leased them."""
    wait_until((folder / job).exists)
    return (folder / job).read_text()


def is_waiting(folder: Path, name: str) -> bool:
    """Return whether a process has printed that it waits for GPUs."""
    return "INFO: waiting for" in (folder / f"{name}.err").read_text()


def test_a_job_leases_the_lowest_free_gpus_including_those_of_killed_processes(tmp_path: Path, hold: Any):
    first = hold("a", 1)
    assert sees(tmp_path, "a-0") == "0"
    hold("b", 1)
    assert sees(tmp_path, "b-0") == "1"
    hold("c", 2)
    wait_until(lambda: is_waiting(tmp_path, "c"))
    message = (tmp_path / "c.err").read_text()
    assert message == "INFO: waiting for 2 of the GPUs 0, 1, 2: other jobs use them\n"
    hold("d", 1)  # `c` holds no single GPU while it waits for two
    assert sees(tmp_path, "d-0") == "2"
    first.send_signal(signal.SIGKILL)
    (tmp_path / "d-0-ends").touch()
    assert sees(tmp_path, "c-0") == "0,2"


def test_later_jobs_of_a_process_keep_the_gpu_of_the_first_because_cuda_has_started(tmp_path: Path, hold: Any):
    hold("a", 1)
    assert sees(tmp_path, "a-0") == "0"
    hold("b", 1, 1, 2)
    assert sees(tmp_path, "b-0") == "1"
    (tmp_path / "a-0-ends").touch()
    (tmp_path / "b-0-ends").touch()
    assert sees(tmp_path, "b-1") == "1"
    (tmp_path / "b-1-ends").touch()
    assert sees(tmp_path, "b-2") == "1,0"  # rank 0 uses the first


def test_gpus_may_have_names_and_a_request_for_too_many_leases_none(tmp_path: Path, hold: Any):
    """The launch checks the number of GPUs later, and raises the error."""
    hold("a", 1, gpus="MIG-GPU-1/2/0, GPU-7")
    assert sees(tmp_path, "a-0") == "MIG-GPU-1/2/0"
    hold("b", 3, gpus="0,1,-1,2")
    assert sees(tmp_path, "b-0") == "0,1,-1,2"


def test_a_canceled_job_stops_waiting_for_gpus(tmp_path: Path, hold: Any):
    hold("a", 3)
    assert sees(tmp_path, "a-0") == "0,1,2"
    waiting = hold("b", 1)
    wait_until(lambda: is_waiting(tmp_path, "b"))
    (tmp_path / "over-b").touch()
    assert waiting.wait() == 143


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets this process see the GPUs 3 and 4, and forget earlier leases."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gpus, "_chosen", [])
    gpus._gpus.cache_clear()
    with gpus.given_back():
        yield
    gpus._gpus.cache_clear()


def test_a_lease_folder_of_another_user_is_refused(here: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus.os, "getuid", lambda: os.stat("/").st_uid + 7)
    with pytest.raises(PermissionError, match=r"runner-gpus-\d+ belongs to another user"):
        gpus.lease(1)


@pytest.mark.parametrize(
    ("jobs", "device", "seen"),
    [(2, "auto", "3"), (2, "cuda", "3"), (1, "auto", "3,4"), (2, "cpu", "3,4"), (2, "cuda:1", "3,4")],
)
def test_jobs_lease_a_gpu_only_if_several_run_on_automatic_devices(
    jobs: int, device: str, seen: str, here: None, tmp_path: Path
):
    launcher = {"_target_": "hydra_plugins.JoblibLauncher", "n_jobs": jobs}
    start_ranks(
        small_experiment().with_trainer(device=device),
        OmegaConf.create({"launcher": launcher, "sweep": {"dir": str(tmp_path)}}),
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.slow
def test_each_job_of_a_parallel_sweep_sees_its_own_gpu(run_app: Any, tmp_path: Path):
    (tmp_path / "own.py").write_text(MEETS)
    sweep = ("-m", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep")
    small = ("model=mlp", "data.batch_size=400", "trainer.max_duration=1ba")
    own = ("callbacks=[checkpoint_saver]", "+callbacks.meets._target_=own.Meets")
    run_app(*sweep, *small, *own, env={"CUDA_VISIBLE_DEVICES": "5,7", "TMPDIR": str(tmp_path)})
    assert {path.name for path in tmp_path.glob("sees-*")} == {"sees-5", "sees-7"}
