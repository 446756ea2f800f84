"""A real Slurm of two nodes on this machine: jobs that are requeued, run out of time, or lose a node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from python_process import PATIENCE, find_free_port, wait_until
from slurm_cluster import Cluster, missing, running_cluster
from stores import query

from runner.checkpoints.files import find_checkpoint, read_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
]

BATCHES = 1500
TINY = (
    "model=mlp",
    "data.batch_size=64",
    f"trainer.max_duration={BATCHES}ba",
    "trainer.eval_interval=0",
    "callbacks=[checkpoint_saver,console_summary]",
    "callbacks.checkpoint_saver.save_interval=20ba",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test, so that what one leaves behind does not matter to the next."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with running_cluster(folder) as running:
        yield running


def runner(*arguments: str) -> str:
    """A command line of the runner."""
    return " ".join([sys.executable, "-m", "runner", *arguments])


def submit(cluster: Cluster, folder: Path, command: str, *options: str) -> None:
    """Submit a job of two nodes that runs a command with srun, one task a node."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun {command}\necho srun has ended with $?\n")
    done = subprocess.run(
        ["sbatch", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append", "--output=job.log", *options, script],
        cwd=folder,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def wait_for(cluster: Cluster, folder: Path, is_so, what: str) -> None:
    """Wait for something of a job, and show what it printed if it does not come."""
    try:
        wait_until(is_so)
    except AssertionError:
        log = folder / "job.log"
        state = cluster.ask("squeue", "-h", "-o", "%i %T %r %R")
        pytest.fail(f"{what} did not come; the queue: {state!r}\n{log.read_text() if log.exists() else 'no log'}")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of the runs below a folder."""
    return [path.parent for path in folder.glob("outputs/*/*/checkpoints/[!.]*/manifest.json")]


def run_in(folder: Path) -> Path:
    """The only run that commands left in a folder."""
    (run,) = {path.parents[1] for path in checkpoints(folder)}
    return run


def status(folder: Path) -> str:
    """How the run in a folder stands."""
    return json.loads((run_in(folder) / "result.json").read_text())["status"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The last weights of a run."""
    return read_file(find_checkpoint(run), "model.pt")


def assert_equal_to_a_whole_run(folder: Path, run: Path, *changes: str) -> None:
    """The weights of a run are those of the same command on two ranks of one machine, which nobody interrupts."""
    whole = folder / "whole"
    whole.mkdir()
    command = runner(*TINY, *changes, "launch.nproc_per_node=2").split()
    subprocess.run(command, cwd=whole, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
    expected = weights(run_in(whole))
    found = weights(run)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_signal_of_the_scheduler_costs_no_batch(cluster: Cluster, tmp_path: Path):
    logged = ("callbacks=[checkpoint_saver,console_summary,mlflow_logger]", "launch.requeue=true")
    submit(cluster, tmp_path, runner(*TINY, *logged))
    wait_for(cluster, tmp_path, lambda: checkpoints(tmp_path), "a checkpoint")
    cluster.ask("scancel", "--signal=USR1", cluster.first_job)
    log = tmp_path / "job.log"
    wait_for(cluster, tmp_path, lambda: f"requeued: Slurm job {cluster.first_job}" in log.read_text(), "the requeue")
    paused = json.loads((find_checkpoint(run_in(tmp_path)) / "manifest.json").read_text())["timestamp"]["batch"]
    assert 20 <= paused < BATCHES
    wait_for(cluster, tmp_path, lambda: status(tmp_path) == "FINISHED", "the end")

    run = run_in(tmp_path)
    assert f"after {paused} batches" in log.read_text()
    logs = [(run / one / "console.log").read_text() for one in ("attempts/1", ".")]
    assert all(text.count("MLP, ") == 1 for text in logs) and f"after {paused} batches" in logs[0]
    assert "queued" in logs[0] and "trained" in logs[1]
    sql = "select m.step from metrics m where m.key = 'loss/train/total' order by m.step"
    steps = [step for (step,) in query(tmp_path / "outputs" / "mlflow.db", sql)]
    assert steps == [*range(1, BATCHES + 1)], "each batch is logged once, in one run"
    assert query(tmp_path / "outputs" / "mlflow.db", "select count(*) from runs") == [(1,)]
    assert_equal_to_a_whole_run(tmp_path, run)


def test_torchrun_s_script_of_the_docs_goes_on_after_a_signal(cluster: Cluster, tmp_path: Path):
    """As it stands on the page, but for one process a node without a GPU, and for names that no name server knows."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    script = next(one for one in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "srun torchrun" in one)
    torchrun = f"{sys.executable} -m torch.distributed.run --local-addr=127.0.0.1"
    changes = {
        " --gpus-per-node=8": "",
        "--nproc_per_node=8": "--nproc_per_node=1",
        "srun torchrun": f"srun {torchrun}",
        "$head:29400": f"127.0.0.1:{find_free_port()}",
        "experiment=digits_plain": " ".join(TINY),
    }
    for before, after in changes.items():
        assert before in script
        script = script.replace(before, after)
    (tmp_path / "job.sh").write_text(script)
    cluster.ask("sbatch", f"--chdir={tmp_path}", f"--output={tmp_path}/job.log", str(tmp_path / "job.sh"))
    wait_for(cluster, tmp_path, lambda: checkpoints(tmp_path), "a checkpoint")
    cluster.ask("scancel", "--signal=USR1", cluster.first_job)
    log = tmp_path / "job.log"
    wait_for(cluster, tmp_path, lambda: f"requeued: Slurm job {cluster.first_job}" in log.read_text(), "the requeue")
    wait_for(cluster, tmp_path, lambda: status(tmp_path) == "FINISHED", "the end")
    assert (run_in(tmp_path) / "attempts" / "1" / "console.log").is_file()
    assert_equal_to_a_whole_run(tmp_path, run_in(tmp_path))


def test_a_time_limit_is_no_end(cluster: Cluster, tmp_path: Path):
    """Slurm counts limits in minutes, and sends its signal up to a minute early."""
    slow = "callbacks.checkpoint_saver.save_interval=1ba"
    submit(
        cluster,
        tmp_path,
        runner(*TINY, slow, "trainer.max_duration=100000ba", "launch.requeue=true"),
        "--time=1",
        "--signal=USR1@30",
    )
    log = tmp_path / "job.log"
    wait_for(
        cluster,
        tmp_path,
        lambda: log.exists() and f"requeued: Slurm job {cluster.first_job}" in log.read_text(),
        "the requeue",
    )
    assert status(tmp_path) == "QUEUED"
    before = int(find_checkpoint(run_in(tmp_path)).name.partition("-ba")[2])
    wait_for(
        cluster,
        tmp_path,
        lambda: int(find_checkpoint(run_in(tmp_path)).name.partition("-ba")[2]) > before,
        "a batch of the second attempt",
    )


def test_a_lost_node_is_waited_for(cluster: Cluster, tmp_path: Path):
    submit(cluster, tmp_path, runner(*TINY, "launch.requeue=true"))
    wait_for(cluster, tmp_path, lambda: checkpoints(tmp_path), "a checkpoint")
    cluster.lose("n2")
    log = tmp_path / "job.log"
    wait_for(cluster, tmp_path, lambda: f"requeued: Slurm job {cluster.first_job}" in log.read_text(), "the requeue")
    wait_for(cluster, tmp_path, lambda: "n2" in cluster.ask("sinfo", "-h", "-t", "down", "-o", "%N"), "the loss")
    cluster.start_node("n2")
    wait_for(cluster, tmp_path, lambda: status(tmp_path) == "FINISHED", "the end")
    assert_equal_to_a_whole_run(tmp_path, run_in(tmp_path))


@pytest.mark.parametrize(
    "launch", [("launch.nproc_per_node=2",), ("hydra.launcher.nodes=2",)], ids=["ranks of a node", "two nodes"]
)
def test_jobs_of_a_sweep_are_requeued_too(launch: tuple[str, ...], cluster: Cluster, tmp_path: Path):
    command = runner("-m", "hydra/launcher=submitit_slurm", "seed=3,4", *TINY, *launch).split()
    log = (tmp_path / "job.log").open("w")
    with log, subprocess.Popen(command, cwd=tmp_path, env=cluster.environment, stdout=log, stderr=log) as sweep:
        try:
            first = tmp_path / "outputs" / "sweeps"
            wait_for(cluster, tmp_path, lambda: [*first.glob("*/*/seed3-*/checkpoints/ep*")], "a checkpoint")
            (job,) = first.glob("*/*/seed3-*")
            running = cluster.ask("squeue", "-h", "-t", "running", "-o", "%K %A").splitlines()
            numbers = dict(line.split() for line in running)  # of jobs, by their place in the array
            cluster.ask("scancel", "--signal=USR2", numbers["0"])  # as when its time is up, or it is preempted
            assert sweep.wait(PATIENCE) == 0, (tmp_path / "job.log").read_text()
        finally:
            sweep.kill()
    results = [json.loads(path.read_text()) for path in first.glob("*/*/seed*/result.json")]
    assert [one["status"] for one in results] == ["FINISHED", "FINISHED"]
    assert "== again on " in (job / "console.log").read_text()
    assert "== again on " not in (job / "attempts" / "1" / "console.log").read_text()
    assert_equal_to_a_whole_run(tmp_path, job, "seed=3")


def test_a_job_that_cannot_be_requeued_says_so(cluster: Cluster, tmp_path: Path):
    """As where an administrator forbids it."""
    submit(cluster, tmp_path, runner(*TINY, "launch.requeue=true"), "--no-requeue")
    wait_for(cluster, tmp_path, lambda: checkpoints(tmp_path), "a checkpoint")
    cluster.ask("scancel", "--signal=USR1", cluster.first_job)
    log = tmp_path / "job.log"
    wait_for(cluster, tmp_path, lambda: "srun has ended" in log.read_text(), "the end")
    assert f"did not requeue job {cluster.first_job}" in log.read_text()
    assert shutil.which("scontrol")
