"""Ranks that a command starts itself: their results, their reuse in sweeps, and that none is left after any end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from python_process import PATIENCE, processes_in, run_python, start_python, wait_until
from stores import query

SHORT = ("model=mlp", "data.batch_size=400", "data.eval_batch_size=300", "callbacks=[checkpoint_saver]")
TWO = "launch.nproc_per_node=2"

OWN = '''
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from runner import Callback, get_global_rank
from runner.distributed import watch


class Witness(Callback):
    """Appends a line about this rank and its weights to `rank<N>.jsonl`."""

    def fit_end(self, state, logger):
        weights = b"".join(value.numpy().tobytes() for value in state.unwrapped_model.state_dict().values())
        facts = {
            "weights": hashlib.sha256(weights).hexdigest(),
            "pid": os.getpid(),
            "job": [state.rank_zero_seed, state.config["launch"]["nproc_per_node"]],
            "group": torch.distributed.is_initialized(),
            "environment": os.environ.get("WORLD_SIZE"),
            "threads": torch.get_num_threads(),
        }
        with Path(f"rank{get_global_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\\n")
        print("witness", get_global_rank())


class Failing(Callback):
    """Fails at the second batch on some ranks, in the run of one seed; with `busy`, the other ranks are busy then."""

    def __init__(self, ranks: list[int], how: str = "raise", seed: int = 0, busy: bool = False):
        self.ranks, self.how, self.seed, self.busy = ranks, how, seed, busy

    def batch_start(self, state, logger):
        if state.timestamp.batch != 1 or state.rank_zero_seed != self.seed:
            return
        if get_global_rank() not in self.ranks:
            time.sleep(60 if self.busy else 0)
        elif self.how == "raise":
            raise ValueError(f"the cause on rank {get_global_rank()}")
        elif self.how == "exit":
            os._exit(3)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class Stuck(Callback):
    """Never closes on rank 0, as if it waited for a GPU and a lost rank; with `unread`, stderr is a closed pipe."""

    def __init__(self, unread: bool = False):
        watch.CLOSING = 2.0
        self.unread = unread

    def close(self, state, logger):
        if self.unread:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, sys.stderr.fileno())
        while get_global_rank() == 0:
            time.sleep(60)


class Refused(Callback):
    """Raises an error on one rank before training."""

    def __init__(self, rank: int):
        self.rank = rank

    def init(self, state, logger):
        if get_global_rank() == self.rank:
            raise ValueError(f"rank={self.rank!r}: refused")


class Interrupted(Callback):
    """Sends a Ctrl-C only to rank 1, before it trains."""

    def init(self, state, logger):
        if get_global_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)


class Endless(Callback):
    """Creates a file when training has started, and slows it down; with `busy`, rank 1 does not notice the others."""

    def __init__(self, busy: bool = False):
        self.busy = busy

    def batch_end(self, state, logger):
        if state.timestamp.batch == 3:
            Path(f"training{get_global_rank()}-{state.rank_zero_seed}").touch()
            time.sleep(60 if self.busy and get_global_rank() == 1 else 0)
        time.sleep(0.02)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def use(name: str, **arguments: object) -> list[str]:
    """Return the overrides that add a callback of `own.py`."""
    key = f"+callbacks.{name.lower()}"
    return [f"{key}._target_=own.{name}", *(f"{key}.{argument}={value}" for argument, value in arguments.items())]


def read_witness(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return what `Witness` wrote on a rank, job by job."""
    return [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]


class Command(NamedTuple):
    """A running command, in a working directory of its own."""

    process: Any
    folder: Path

    def alive(self) -> list[psutil.Process]:
        """Return its process and all descendants, including orphans."""
        return processes_in(self.folder)

    def ranks(self) -> list[str]:
        """Return the ranks that run as child processes. Only with `real`: forked processes show no environment."""
        ranks = []
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                ranks.append(process.environ().get("RANK"))
        return [rank for rank in ranks if rank is not None]

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        commands = []
        for process in alive:
            with contextlib.suppress(psutil.Error):
                commands.append(" ".join(process.cmdline()))
        assert not commands

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()


@contextlib.contextmanager
def started(folder: Path, *arguments: str, real: bool = False) -> Iterator[Command]:
    """Start a command, and kill it with all processes that it has started at the end of the block."""
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = start_python(["-m", "runner", *arguments], real=real, cwd=folder, stdout=out, stderr=err)
    command = Command(process, folder)
    try:
        yield command
    finally:
        for running in command.alive():
            with contextlib.suppress(psutil.Error):
                running.kill()
        process.wait(PATIENCE)


def torchrun(folder: Path, *arguments: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run_python([*command, *arguments], cwd=folder, env=env, check=True)


@pytest.mark.slow
def test_local_ranks_train_the_same_weights_as_ranks_of_torchrun(folder: Path, run_app: Any):
    arguments = (*SHORT, "trainer.max_duration=2ep", *use("Witness"))
    run_app(*arguments, TWO, env={"OMP_NUM_THREADS": None})
    torchrun(folder, *arguments)
    local, of_torchrun = zip(read_witness(folder, 0), read_witness(folder, 1), strict=True)
    assert {rank["weights"] for rank in (*local, *of_torchrun)} == {local[0]["weights"]}
    assert local[0]["pid"] != local[1]["pid"] and all(rank["group"] for rank in local)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [rank["threads"] for rank in (*local, *of_torchrun)] == [threads] * 4
    first, second = sorted(folder.glob("outputs/20*/*"))
    for run_dir in (first, second):
        assert json.loads((run_dir / "environment.json").read_text())["ranks"] == 2


def test_a_sweep_reuses_its_ranks_except_for_jobs_of_one_process(folder: Path, run_app: Any):
    run_app("-m", *SHORT, "trainer.max_duration=1ep", "launch.nproc_per_node=2,1", "seed=0,1", *use("Witness"))
    zero, one = read_witness(folder, 0), read_witness(folder, 1)
    assert [job["job"] for job in zero] == [[0, 2], [1, 2], [0, 1], [1, 1]]
    assert [job["job"] for job in one] == [[0, 2], [1, 2]]
    assert len({job["pid"] for job in zero}) == len({job["pid"] for job in one}) == 1
    assert [job["group"] for job in zero] == [True, True, False, False]
    assert [job["environment"] for job in zero] == ["2", "2", None, None]
    assert len({job["weights"] for job in zero}) == 4
    assert [job["weights"] for job in one] == [job["weights"] for job in zero[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_jobs_of_parallel_launchers_have_ranks(folder: Path, run_app: Any, launcher: str):
    """Two jobs with two ranks each run at the same time."""
    jobs = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    command = ("-m", *SHORT, "trainer.max_duration=1ep", "seed=0,1", TWO, f"hydra/launcher={launcher}", *jobs)
    finished = run_app(*command, *use("Witness"), env={"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None})
    zero, one = ({job["job"][0]: job for job in read_witness(folder, rank)} for rank in (0, 1))
    assert [zero[seed]["weights"] for seed in (0, 1)] == [one[seed]["weights"] for seed in (0, 1)]
    assert zero[0]["weights"] != zero[1]["weights"]
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert {job["threads"] for job in (*zero.values(), *one.values())} == {threads}
    assert "witness" not in finished.stdout
    for log in folder.glob("outputs/sweeps/*/*/*/console.log"):  # with the output of both ranks
        assert sorted(log.read_text().splitlines()) == ["witness 0", "witness 1"]


@pytest.mark.parametrize(
    ("ranks", "how", "end"),
    [
        ("[1]", "raise", "ValueError: the cause on rank 1"),
        pytest.param("[0]", "raise", "ValueError: the cause on rank 0", marks=pytest.mark.slow),
        ("[0,1]", "raise", "ValueError: the cause on rank 0"),
        pytest.param("[1]", "exit", "it ended with exit code 3", marks=pytest.mark.slow),
        ("[1]", "kill", "it was killed by SIGKILL"),
    ],
)
def test_the_first_failure_ends_all_ranks_and_is_the_last_line(folder: Path, ranks: str, how: str, end: str):
    with started(folder, *SHORT, TWO, "launch.restarts=0", *use("Failing", ranks=ranks, how=how)) as command:
        assert command.process.wait(PATIENCE) == (75 if how == "kill" else 1)
        command.wait_until_gone()
    text = command.stderr()
    notes = ("raised by", "with a batch of", "in callbacks")
    *_, last = [line for line in text.splitlines() if not line.startswith(notes)]
    assert text.count("\nwith a batch of") == (how == "raise"), text
    assert last.startswith(end), text
    assert text.count("Traceback") == (how == "raise"), text
    assert "peer" not in text


@pytest.mark.slow
def test_a_busy_rank_0_is_interrupted_when_another_rank_fails(folder: Path):
    arguments = (*SHORT, TWO, "+callbacks=mlflow_logger", *use("Failing", ranks="[1]", busy="true"))
    with started(folder, *arguments, real=True) as command:
        wait_until(lambda: command.ranks() == ["1"])
        wait_until(lambda: not command.ranks())
        assert command.process.wait(PATIENCE) == 1
        command.wait_until_gone()
    assert "ValueError: the cause on rank 1" in command.stderr()
    assert query(folder / "outputs" / "mlflow.db", "select status from runs") == [("FAILED",)]


@pytest.mark.slow
def test_a_rank_0_that_cannot_close_is_killed(folder: Path):
    own = (*use("Failing", ranks="[1]", how="kill"), *use("Stuck"))
    with started(folder, *SHORT, TWO, "launch.restarts=0", *own) as command:
        assert command.process.wait(PATIENCE) == 75
        command.wait_until_gone()
    assert "it was killed by SIGKILL, which the system does when memory is short" in command.stderr().splitlines()


@pytest.mark.slow
def test_a_rank_0_that_cannot_close_is_killed_even_if_stderr_is_closed(folder: Path):
    own = (*use("Failing", ranks="[1]", how="kill"), *use("Stuck", unread="true"))
    with started(folder, *SHORT, TWO, "launch.restarts=0", *own) as command:
        assert command.process.wait(PATIENCE) == 75
        command.wait_until_gone()


def test_the_job_after_a_failure_gets_new_ranks(folder: Path, run_app: Any):
    sweep = ("-m", *SHORT, "trainer.max_duration=1ep", TWO, "seed=0,1", *use("Failing", ranks="[1]"), *use("Witness"))
    finished = run_app(*sweep, exit_code=1)
    assert "ValueError: the cause on rank 1" in finished.stderr
    assert (
        [job["job"] for job in read_witness(folder, 0)] == [job["job"] for job in read_witness(folder, 1)] == [[1, 2]]
    )


@pytest.mark.slow
def test_the_job_after_an_error_on_rank_0_alone_gets_new_ranks(folder: Path, run_app: Any):
    """The other rank still waits for rank 0, so it cannot be reused."""
    sweep = ("-m", *SHORT, "trainer.max_duration=1ep", TWO, *use("Refused", rank="0,-1"), *use("Witness"))
    finished = run_app(*sweep, exit_code=None)
    assert finished.returncode, finished.stdout
    assert "error: callbacks.refused.rank=0: refused" in finished.stderr
    assert len(read_witness(folder, 0)) == len(read_witness(folder, 1)) == 1


def test_rank_0_does_not_wait_for_a_rank_that_alone_was_interrupted(folder: Path, run_app: Any):
    finished = run_app(*SHORT, TWO, *use("Interrupted"), exit_code=1)
    reason = "rank 1 failed:\nit was ended by SIGINT before the ranks could agree to end"
    assert finished.stderr.rstrip().endswith(reason)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_suspended_rank_does_not_keep_rank_0_from_ending(folder: Path, number: int):
    with started(folder, *SHORT, TWO, "trainer.max_duration=1000ep", "launch.grace=2", *use("Endless")) as command:
        wait_until(lambda: (folder / "training1-0").exists())
        (other_rank,) = [process for process in command.alive() if process.pid != command.process.pid]
        other_rank.suspend()
        time.sleep(2)  # until rank 0 waits for it
        for _ in range(1 if number == signal.SIGTERM else 2):
            os.kill(command.process.pid, number)
            time.sleep(0.5)
        start_time = time.monotonic()
        assert command.process.wait(PATIENCE) == 128 + number
        assert time.monotonic() - start_time < 30
        command.wait_until_gone()


def end_at(folder: Path, number: int, phase: str) -> None:
    """End a run of two ranks by a signal, and check that no process is left, and a checkpoint if it was training."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    busy = str(number == signal.SIGKILL).lower()
    endless = (*SHORT, TWO, "trainer.max_duration=1000ep", *use("Endless", busy=busy))
    with started(folder, *endless, real=phase == "imports") as command:
        if phase == "imports":
            wait_until(lambda: command.ranks() == ["1"])
        else:
            wait_until(lambda: (folder / "training1-0").exists())
        os.kill(command.process.pid, number)
        code = command.process.wait(PATIENCE)
        command.wait_until_gone()
    if number == signal.SIGKILL:
        assert code == -signal.SIGKILL
    elif phase == "training":
        assert code == 128 + number
        assert list(folder.glob("outputs/20*/*/checkpoints/latest/manifest.json"))
        assert "Traceback" not in command.stderr()
    else:
        assert code in (-number, 128 + number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_ended_by_a_signal_leaves_no_process(tmp_path: Path, number: int):
    for phase in ("imports", "training"):
        end_at(tmp_path / phase, number, phase)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_killed_sweep_leaves_no_process(folder: Path, launcher: str):
    jobs = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    sweep = ("-m", *SHORT, "seed=0,1", TWO, f"hydra/launcher={launcher}", *jobs, "trainer.max_duration=1000ep")
    with started(folder, *sweep, *use("Endless")) as command:
        wait_until(lambda: all((folder / f"training1-{seed}").exists() for seed in (0, 1)))
        command.process.kill()
        command.wait_until_gone()
    assert len(list(folder.glob("outputs/sweeps/*/*/*/checkpoints/latest/manifest.json"))) == 2


def test_a_warning_names_its_rank_except_for_rank_0(tmp_path: Path, run_app: Any):
    warns = "def fit_start(self, state, logger): logging.getLogger('runner').warning('low')"
    source = f"import logging\nfrom runner import Callback\nclass Warns(Callback):\n    {warns}\n"
    (tmp_path / "own.py").write_text(source)
    finished = run_app(*SHORT, TWO, "trainer.max_duration=1ba", "+callbacks.own._target_=own.Warns")
    assert {"WARNING: low", "WARNING: rank 1: low"} <= {*finished.stderr.splitlines()}


@pytest.mark.slow
def test_a_module_in_the_working_directory_does_not_hide_the_runner_from_ranks(folder: Path, run_app: Any):
    (folder / "runner.py").write_text("raise SystemExit('the wrong module')")
    program = "from runner.__main__ import command; command()"  # like the console script
    arguments = (*SHORT, TWO, "trainer.max_duration=1ba", *use("Witness"))
    run_python(["-P", "-c", program, *arguments], cwd=folder, check=True, real=True)
    assert len(read_witness(folder, 1)) == 1


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused(run_app: Any):
    import torch

    gpus = torch.cuda.device_count()
    finished = run_app(*SHORT, f"launch.nproc_per_node={gpus + 1}", exit_code=2)
    assert finished.stderr.startswith(f"error: launch.nproc_per_node={gpus + 1}: each process needs its own GPU")
    assert len(finished.stderr.splitlines()) == 1
