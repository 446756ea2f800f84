"""Ranks that torchrun starts, and the messages with which rank 0 passes jobs to the others."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from python_process import Finished, describe, run_python
from stores import query

from runner.distributed.environment import is_rank_zero
from runner.distributed.launch import Launch, Ranks, check_gpus
from runner.distributed.launch_secret import signed, use_secret
from runner.distributed.local_ranks import LocalRanks

OWN = '''
import hashlib
import json
import os
import signal
from pathlib import Path

from runner import Callback, get_global_rank


class Witness(Callback):
    """Writes the settings and the result of this rank to a file."""

    def fit_end(self, state, logger):
        weights = b"".join(value.numpy().tobytes() for value in state.unwrapped_model.state_dict().values())
        facts = {
            "config": state.config,
            "run_dir": str(state.run_dir),
            "run_name": state.run_name,
            "weights": hashlib.sha256(weights).hexdigest(),
            "samples": state.timestamp.sample,
            "seed": state.seed,
        }
        Path(f"rank{get_global_rank()}.json").write_text(json.dumps(facts))


class Dying(Callback):
    """Kills rank 1 in each attempt of torchrun at the batch that is listed for it, if any."""

    def __init__(self, batches: list[int], seed: int = 0):
        self.batches, self.seed = dict(enumerate(batches)), seed

    def batch_start(self, state, logger):
        batch = self.batches.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        if get_global_rank() == 1 and state.timestamp.batch == batch and state.rank_zero_seed == self.seed:
            os.kill(os.getpid(), signal.SIGKILL)
'''


SHORT = ("model=mlp", "data.batch_size=400", "data.eval_batch_size=300")
ALONE = ("--standalone", "--nproc_per_node=2")


def torchrun(
    folder: Path, *arguments: str, options: Sequence[str] = ALONE, timeout: float = 120.0, real: bool = False
) -> Finished:
    command = ["-m", "torch.distributed.run", *options, "-m", "runner", *arguments]
    return run_python(command, cwd=folder, timeout=timeout, real=real)


def steps(folder: Path) -> list[tuple[str, int]]:
    """Return the run and the step of each training loss in MLflow."""
    losses = "select runs.name, step from metrics join runs using (run_uuid) where key = 'loss/train/total'"
    return sorted(query(folder / "outputs" / "mlflow.db", losses))


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_ranks_of_torchrun_are_one_run(tmp_path: Path, real: bool):
    (tmp_path / "own.py").write_text(OWN)
    finished = torchrun(
        tmp_path,
        *("trainer.max_duration=3ba", "model=mlp", "data.batch_size=400", "scheduler=none", "trainer.eval_interval=0"),
        *("+callbacks.witness._target_=own.Witness", "~callbacks.learning_curves"),
        real=real,
    )
    assert finished.returncode == 0, finished.stderr
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first.pop("seed"), second.pop("seed")) == (0, 1)
    assert first == second
    assert first["samples"] == 1200
    assert first["config"]["data"]["batch_size"] == 400

    (run_dir,) = tmp_path.glob("outputs/20*/*")
    assert str(run_dir) == first["run_dir"]
    store = tmp_path / "outputs" / "mlflow.db"
    assert query(store, "select status, name from runs") == [("FINISHED", first["run_name"])]
    assert query(store, "select count(*) from metrics where key = 'loss/train/total'") == [(3,)]
    assert finished.stdout.count("2 x cpu") == 1
    assert finished.stdout.splitlines()[-1].startswith("mlflow ui ")


def test_jobs_reach_the_other_ranks_in_order(run_ranks: Any):
    def program():
        from time import sleep

        from runner.distributed.launch import Ranks

        ranks = Ranks()
        if ranks.rank == 0:
            for seed in range(2):
                with ranks.sharing({"config": {"seed": seed, "callbacks": {"a": [1, None]}}, "run_name": f"run{seed}"}):
                    pass
            ranks.dismiss(3)
        else:
            try:
                for job in ranks.receive():
                    print(job)
                    sleep(ranks.rank / 2)  # so rank 0, which hosts the store, is the first to finish
            finally:
                ranks.leave()

    finished = run_ranks(program, 3, check=False)
    assert [rank.returncode for rank in finished] == [0, 3, 3], finished
    jobs = [{"config": {"seed": seed, "callbacks": {"a": [1, None]}}, "run_name": f"run{seed}"} for seed in range(2)]
    assert finished[1].stdout.splitlines() == finished[2].stdout.splitlines() == [str(job) for job in jobs]


@pytest.mark.slow
def test_a_rank_can_wait_for_the_next_message_of_rank_0(run_ranks: Any):
    def program():
        from turns import say, wait_for  # pyright: ignore[reportMissingImports]

        from runner.distributed.launch import Ranks

        ranks = Ranks()
        if ranks.rank == 0:
            with ranks.sharing({}):
                wait_for("nothing came")
            ranks.dismiss(2)
            wait_for("more came")
        else:
            next(ranks.receive())
            print(ranks.has_next_message(seconds=0.2))
            say("nothing came")
            print(ranks.has_next_message(seconds=120))
            say("more came")

    finished = run_ranks(program, 2)
    assert finished[1].stdout.split() == ["False", "True"]


def test_a_single_process_shares_its_job_with_nobody(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert is_rank_zero()
    ranks = LocalRanks()
    ranks.start(1, None)
    with ranks.sharing({}):
        assert "RANK" not in os.environ
    ranks.dismiss(0)
    assert (ranks.rank, ranks.size) == (0, 1)
    assert "MASTER_ADDR" not in os.environ
    monkeypatch.setenv("RANK", "1")
    assert not is_rank_zero()


@pytest.mark.slow
def test_a_restart_by_torchrun_continues_from_the_latest_checkpoint(tmp_path: Path):
    """A rank is killed before the first checkpoint and after it: there is one run, which logs each batch once."""
    (tmp_path / "own.py").write_text(OWN)
    finished = torchrun(
        tmp_path,
        *(*SHORT, "trainer.max_duration=4ep", "callbacks=[mlflow_logger,checkpoint_saver]"),
        *("+callbacks.dying._target_=own.Dying", "+callbacks.dying.batches=[1,4]"),
        options=[*ALONE, "--max-restarts=2"],
    )
    assert finished.returncode == 0, finished.stderr
    (run_dir,) = tmp_path.glob("outputs/20*/*")
    assert (run_dir / "checkpoints" / "latest").resolve().name == "ep4-ba12"
    recorded = json.loads((run_dir / "environment.json").read_text())
    assert recorded["from_checkpoint"] == str(run_dir / "checkpoints" / "ep1-ba3") and recorded["from_batch"] == 3
    assert steps(tmp_path) == [(f"{run_dir.name}-mlp-digits-{run_dir.parent.name}", step) for step in range(1, 13)]


@pytest.mark.slow
def test_a_restart_by_torchrun_does_not_repeat_finished_jobs_of_a_sweep(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    finished = torchrun(
        tmp_path,
        *("-m", *SHORT, "seed=0,1,2", "trainer.max_duration=2ep", "callbacks=[mlflow_logger,checkpoint_saver]"),
        *("+callbacks.dying._target_=own.Dying", "+callbacks.dying.batches=[4]", "+callbacks.dying.seed=1"),
        options=[*ALONE, "--max-restarts=1"],
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("skipped: it has already ended") == 1
    assert len(list(tmp_path.glob("outputs/sweeps/20*/*/seed*-mlp-digits"))) == 3
    assert steps(tmp_path) == [(f"seed{seed}-mlp-digits", step) for seed in range(3) for step in range(1, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("local", [1, 2])
def test_two_nodes_train_as_one(tmp_path: Path, free_port: int, local: int):
    """Two agents run on this machine. A rank is killed, which only one of the agents counts as a restart."""
    (tmp_path / "own.py").write_text(OWN)
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--max-restarts=1")
    options = ["--nnodes=2", f"--nproc_per_node={local}", *rendezvous]
    arguments = [*SHORT, "trainer.max_duration=3ep", "callbacks=[mlflow_logger,checkpoint_saver]"]
    arguments += ["+callbacks.dying._target_=own.Dying", "+callbacks.dying.batches=[4]"]
    with ThreadPoolExecutor() as pool:
        nodes = [pool.submit(torchrun, tmp_path, *arguments, options=options) for _ in range(2)]
        finished = [node.result() for node in nodes]
    assert [node.returncode for node in finished] == [0, 0], describe(finished)
    (run_dir,) = tmp_path.glob("outputs/20*/*")
    recorded = json.loads((run_dir / "environment.json").read_text())
    assert recorded["from_checkpoint"] == str(run_dir / "checkpoints" / "ep1-ba3") and recorded["from_batch"] == 3
    assert json.loads((run_dir / "environment.json").read_text())["ranks"] == 2 * local
    assert [step for _, step in steps(tmp_path)] == list(range(1, 10))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("launch.nproc_per_node=3",), "launch.nproc_per_node=3: torchrun or srun has started 2 on this machine"),
        (("-m", "seed=0,1", "hydra/launcher=joblib"), "hydra/launcher=joblib: starts its own processes"),
    ],
)
def test_arguments_that_torchrun_excludes_are_refused(tmp_path: Path, arguments: tuple[str, ...], part: str):
    finished = torchrun(tmp_path, *arguments, "callbacks=none")
    assert finished.stderr.count("error: ") == 1 and f"error: {part}" in finished.stderr
    assert "exitcode  : 2" in finished.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("count", [0, -1, "x", 1.5, 3.0, True, None])
def test_an_invalid_number_of_processes_is_refused(count: Any):
    with pytest.raises(
        ValueError, match=f"nproc_per_node={count!r}: must be 'auto', for all GPUs, or a whole number, at least 1"
    ):
        Launch(nproc_per_node=count)


@pytest.mark.parametrize("count", [0, -1, "x", 1.5, 3.0, True])
def test_an_invalid_number_of_threads_is_refused(count: Any):
    with pytest.raises(ValueError, match=f"threads={count!r}: must be a whole number, at least 1, or None"):
        Launch(threads=count)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "x", True])
def test_an_invalid_grace_is_refused(seconds: Any):
    with pytest.raises(ValueError, match=f"grace={seconds!r}: must be a number of seconds above 0"):
        Launch(grace=seconds)


def test_the_number_of_processes_is_that_of_the_argument_or_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    import torch

    assert Launch().processes() == 1
    assert Launch(nproc_per_node=3).processes() == 3
    assert Launch(nproc_per_node="auto").processes() == max(1, torch.cuda.device_count())
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert [Launch(nproc_per_node=count).processes() for count in (1, 2, "auto")] == [2, 2, 2]
    with pytest.raises(ValueError, match="launch.nproc_per_node=4: torchrun or srun has started 2"):
        Launch(nproc_per_node=4).processes()


def test_several_processes_on_one_gpu_are_refused():
    with pytest.raises(ValueError, match="trainer.device='cuda:0': each of 2 processes needs its own GPU"):
        check_gpus(2, "cuda:0")
    check_gpus(1, "cuda:0")
    check_gpus(2, "cpu")


def test_a_command_with_an_invalid_number_of_processes_starts_none(run_app: Any, tmp_path: Path):
    finished = run_app("launch.nproc_per_node=x", exit_code=2)
    assert finished.stderr.startswith("error: launch.nproc_per_node=") and len(finished.stderr.splitlines()) == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("secret", "exit_code"), [("ours", 7), ("theirs", 1)])
def test_a_rank_accepts_only_messages_signed_with_the_secret_of_its_launch(
    tmp_path: Path, secret: str, exit_code: int, request: pytest.FixtureRequest
):
    """The check is needed because any process on the machine can write to the store."""
    from torch._C._distributed_c10d import TCPStore

    request.addfinalizer(lambda: use_secret(""))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    use_secret(secret)
    store.set("message/0", signed("message/0", json.dumps({"exit": 7})))
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    finished = run_python(["-m", "runner"], cwd=tmp_path, env={**os.environ, **rank, "RUNNER_SECRET": "ours"})
    assert finished.returncode == exit_code, finished.stderr
    assert ("PermissionError: message/0 in the ranks' key-value store" in finished.stderr) == (secret == "theirs")


def test_ranks_remove_the_secret_from_the_environment_of_child_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUNNER_SECRET", "")
    Ranks()
    assert "RUNNER_SECRET" not in os.environ


def test_verbs_that_do_not_train_use_no_other_ranks(run_app: Any, tmp_path: Path):
    """They start none, and dismiss those that torchrun has started."""
    (tmp_path / "own.py").write_text(
        "import os, psutil, runner\n"
        "class Counting(runner.Callback):\n"
        "    def __init__(self):\n"
        "        ranks = [child for child in psutil.Process().children() if child.cwd() == os.getcwd()]\n"
        "        print('counted', os.environ.get('WORLD_SIZE'), len(ranks))\n"
        "    def batch_end(self, state, logger):\n"
        "        pass\n"
    )
    arguments = ("check", *SHORT, "callbacks=none", "+callbacks.counting._target_=own.Counting")
    inside = run_app(*arguments, "launch.nproc_per_node=2").stdout
    outside = torchrun(tmp_path, *arguments)
    assert outside.returncode == 0, outside.stderr
    for text in (inside, outside.stdout):
        assert {line for line in text.splitlines() if line.startswith("counted")} == {"counted None 0"}
