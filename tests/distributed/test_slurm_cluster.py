"""Jobs that are requeued, reach their time limit or lose a node, on a real Slurm with two nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from python_process import PATIENCE, find_free_port, wait_until
from stores import query

from runner.checkpoints.files import find_checkpoint, read_file

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
NODES = ("n1", "n2")
ANSWER = 60.0  # seconds for a daemon to answer


def reason_to_skip() -> str:
    """Return why no cluster can be started on this machine, or an empty string."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "only root can start Slurm's daemons"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip() or "Slurm is installed"),
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


class Cluster:
    """A Slurm cluster of two nodes with two processors each, all of whose daemons run on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        # The port of the ranks is derived from the job's number, so clusters at the same time need different numbers.
        self.first_job = str(_free_ports(1)[0])
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}  # the nodes have no DNS entries

    def start(self) -> None:
        """Start munge, the controller and the nodes, and wait until the nodes are idle."""
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(self._config())
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        munge = {kind: f"{self.folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed", "socket")}
        options = {"key": "key-file", "log": "log-file", "pid": "pid-file", "seed": "seed-file", "socket": "socket"}
        self._start("munged", "-F", "--force", *(f"--{options[kind]}={path}" for kind, path in munge.items()))
        self._wait(lambda: Path(munge["socket"]).exists(), "munge")
        self._start("slurmctld", "-D", "-i")
        self._wait(lambda: "UP" in self.ask("scontrol", "ping"), "the controller")
        for node in NODES:
            self.start_node(node)
        self._wait(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "the nodes")

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def lose(self, node: str) -> None:
        """Kill a node's daemon and all tasks on the node, as a power cut would."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        self._kill_tasks(node)

    def _kill_tasks(self, node: str) -> None:
        """Kill the tasks of a node and the daemon of each task, which is only found as the parent of its task."""
        variables = {"SLURM_CONF": self.environment["SLURM_CONF"], "SLURMD_NODENAME": node}
        tasks = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if variables.items() <= process.environ().items():
                    tasks.append(process)
        daemons = {parent for task in tasks for parent in task.parents() if parent.name() == "slurmstepd"}
        for process in [*daemons, *tasks]:
            with suppress(psutil.Error):
                process.kill()

    def ask(self, *command: str) -> str:
        """Return the output of a Slurm command, or an empty string if it fails."""
        process = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=ANSWER)
        return process.stdout if process.returncode == 0 else ""

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        log = (self.folder / f"{name or program}.out").open("ab")
        with log:
            path = shutil.which(program, path=_path())
            assert path is not None
            self.daemons[name or program] = subprocess.Popen(
                [path, *arguments], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, is_ready, part: str) -> None:
        deadline = time.monotonic() + ANSWER
        while not is_ready():
            assert time.monotonic() < deadline, f"{part} did not start in time, see the logs in {self.folder}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Kill all tasks and daemons."""
        for node in NODES:
            self._kill_tasks(node)
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()

    def _config(self) -> str:
        controller, *ports = _free_ports(3)
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
            for node, port in zip(NODES, ports, strict=True)
        )
        return f"""ClusterName=test
FirstJobId={self.first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={self.folder}/munge.socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
KillWait=20
JobRequeue=1
MailProg=/bin/true
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0,defer
{nodes}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster inside the block."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A new cluster for each test, so that tests do not affect each other."""
    # Not in `tmp_path`: the path of a socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder,
        running_cluster(Path(folder)) as running,
    ):
        yield running


def runner(*arguments: str) -> str:
    """Return a command line of the runner."""
    return " ".join([sys.executable, "-m", "runner", *arguments])


def submit(cluster: Cluster, folder: Path, command: str, *options: str) -> None:
    """Submit a job that runs a command with srun on two nodes, one task per node."""
    script = folder / "job.sh"
    script.write_text(f"#!/bin/bash\nsrun {command}\necho srun has ended with $?\n")
    process = subprocess.run(
        ["sbatch", "--nodes=2", "--ntasks-per-node=1", "--open-mode=append", "--output=job.log", *options, script],
        cwd=folder,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0, process.stderr


def wait_for(cluster: Cluster, folder: Path, condition, event: str) -> None:
    """Wait until a condition holds; otherwise fail the test, with the queue and the output of the job."""
    try:
        wait_until(condition)
    except AssertionError:
        log = folder / "job.log"
        queue = cluster.ask("squeue", "-h", "-o", "%i %T %r %R")
        pytest.fail(f"waited for {event}; the queue: {queue!r}\n{log.read_text() if log.exists() else 'no log'}")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of all runs below a folder."""
    return [path.parent for path in folder.glob("outputs/*/*/checkpoints/[!.]*/manifest.json")]


def run_in(folder: Path) -> Path:
    """Return the folder of the only run below a working directory."""
    (run,) = {path.parents[1] for path in checkpoints(folder)}
    return run


def status(folder: Path) -> str:
    """Return the status of the only run below a working directory."""
    return json.loads((run_in(folder) / "result.json").read_text())["status"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the newest checkpoint of a run."""
    return read_file(find_checkpoint(run), "model.pt")


def assert_equal_to_a_whole_run(folder: Path, run: Path, *changes: str) -> None:
    """Assert that a run has the weights of the same command on two ranks of one machine without an interruption."""
    whole = folder / "whole"
    whole.mkdir()
    command = runner(*TINY, *changes, "launch.nproc_per_node=2").split()
    subprocess.run(command, cwd=whole, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)
    expected = weights(run_in(whole))
    actual = weights(run)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_a_job_requeued_by_a_signal_loses_no_batch(cluster: Cluster, tmp_path: Path):
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
    logs = [(run / attempt / "console.log").read_text() for attempt in ("attempts/1", ".")]
    assert all(text.count("MLP, ") == 1 for text in logs) and f"after {paused} batches" in logs[0]
    assert "queued" in logs[0] and "trained" in logs[1]
    sql = "select m.step from metrics m where m.key = 'loss/train/total' order by m.step"
    steps = [step for (step,) in query(tmp_path / "outputs" / "mlflow.db", sql)]
    assert steps == [*range(1, BATCHES + 1)], "each batch must be logged once, in the same run"
    assert query(tmp_path / "outputs" / "mlflow.db", "select count(*) from runs") == [(1,)]
    assert_equal_to_a_whole_run(tmp_path, run)


def test_the_docs_script_for_torchrun_continues_after_a_signal(cluster: Cluster, tmp_path: Path):
    """The script runs as in the docs, except that nodes have no GPUs and no DNS entries."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    script = next(block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "srun torchrun" in block)
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


def test_a_job_that_reaches_its_time_limit_is_requeued_and_continues(cluster: Cluster, tmp_path: Path):
    """Slurm counts time limits in minutes, and may send its signal up to a minute early."""
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

    def saved_batch() -> int:
        with contextlib.suppress(FileNotFoundError):  # the run removes the checkpoint as soon as it has the next
            return int(find_checkpoint(run_in(tmp_path)).name.partition("-ba")[2])
        return 0

    before = saved_batch()
    wait_for(cluster, tmp_path, lambda: saved_batch() > before, "a batch of the second attempt")


def test_a_job_that_lost_a_node_continues_when_the_node_returns(cluster: Cluster, tmp_path: Path):
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
def test_a_preempted_job_of_a_sweep_is_requeued(launch: tuple[str, ...], cluster: Cluster, tmp_path: Path):
    command = runner("-m", "hydra/launcher=submitit_slurm", "seed=3,4", *TINY, *launch).split()
    log = (tmp_path / "job.log").open("w")
    with log, subprocess.Popen(command, cwd=tmp_path, env=cluster.environment, stdout=log, stderr=log) as sweep:
        try:
            sweeps = tmp_path / "outputs" / "sweeps"
            wait_for(cluster, tmp_path, lambda: [*sweeps.glob("*/*/seed3-*/checkpoints/ep*")], "a checkpoint")
            (job,) = sweeps.glob("*/*/seed3-*")
            running = cluster.ask("squeue", "-h", "-t", "running", "-o", "%K %A").splitlines()
            numbers = dict(line.split() for line in running)  # numbers of jobs, by their index in the array
            cluster.ask("scancel", "--signal=USR2", numbers["0"])  # as at its time limit or its preemption
            assert sweep.wait(PATIENCE) == 0, (tmp_path / "job.log").read_text()
        finally:
            sweep.kill()
    results = [json.loads(path.read_text()) for path in sweeps.glob("*/*/seed*/result.json")]
    assert [result["status"] for result in results] == ["FINISHED", "FINISHED"]
    assert "== again on " in (job / "console.log").read_text()
    assert "== again on " not in (job / "attempts" / "1" / "console.log").read_text()
    assert_equal_to_a_whole_run(tmp_path, job, "seed=3")


def test_a_job_that_cannot_be_requeued_says_so(cluster: Cluster, tmp_path: Path):
    """The option --no-requeue has the effect of a cluster that forbids requeues."""
    submit(cluster, tmp_path, runner(*TINY, "launch.requeue=true"), "--no-requeue")
    wait_for(cluster, tmp_path, lambda: checkpoints(tmp_path), "a checkpoint")
    cluster.ask("scancel", "--signal=USR1", cluster.first_job)
    log = tmp_path / "job.log"
    wait_for(cluster, tmp_path, lambda: "srun has ended" in log.read_text(), "the end")
    assert f"did not requeue job {cluster.first_job}" in log.read_text()
    assert shutil.which("scontrol")
