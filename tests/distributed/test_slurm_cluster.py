"""A real Slurm of two nodes on this machine: jobs that are requeued, run out of time, or lose a node."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
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


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [one for one in PROGRAMS if shutil.which(one, path=_path()) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "only root can start Slurm's daemons"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


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


class Cluster:
    """Two nodes, each with two processors, that are processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.first_job = str(_free_ports(1)[0])  # the ranks' port follows from it: clusters at one time need several
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}  # no name server knows the nodes

    def start(self) -> None:
        """Start munge, the controller and the nodes, and wait until the nodes are idle."""
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(self._config())
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=autodetect\n")
        munge = {one: f"{self.folder}/munge.{one}" for one in ("key", "log", "pid", "seed", "socket")}
        options = {"key": "key-file", "log": "log-file", "pid": "pid-file", "seed": "seed-file", "socket": "socket"}
        self._start("munged", "-F", "--force", *(f"--{options[one]}={path}" for one, path in munge.items()))
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
        """Let a node vanish with all that runs on it, as by a power cut."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        self._kill_what_runs_on(node)

    def _kill_what_runs_on(self, node: str) -> None:
        """Kill the tasks of a node, and the daemons that look after each, which hide what they belong to."""
        mine = {"SLURM_CONF": self.environment["SLURM_CONF"], "SLURMD_NODENAME": node}
        tasks = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if mine.items() <= one.environ().items():
                    tasks.append(one)
        daemons = {parent for one in tasks for parent in one.parents() if parent.name() == "slurmstepd"}
        for one in [*daemons, *tasks]:
            with suppress(psutil.Error):
                one.kill()

    def ask(self, *command: str) -> str:
        """The output of a Slurm command; empty if it fails."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=ANSWER)
        return done.stdout if done.returncode == 0 else ""

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        log = (self.folder / f"{name or program}.out").open("ab")
        with log:
            path = shutil.which(program, path=_path())
            assert path is not None
            self.daemons[name or program] = subprocess.Popen(
                [path, *arguments], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, is_so, what: str) -> None:
        deadline = time.monotonic() + ANSWER
        while not is_so():
            assert time.monotonic() < deadline, f"{what} did not come up: {self.folder}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End all jobs and daemons."""
        for node in NODES:
            self._kill_what_runs_on(node)
        for one in reversed(self.daemons.values()):
            one.kill()
            one.wait()

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
    """A cluster that runs within the context."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


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
    """As if an administrator forbids it."""
    submit(cluster, tmp_path, runner(*TINY, "launch.requeue=true"), "--no-requeue")
    wait_for(cluster, tmp_path, lambda: checkpoints(tmp_path), "a checkpoint")
    cluster.ask("scancel", "--signal=USR1", cluster.first_job)
    log = tmp_path / "job.log"
    wait_for(cluster, tmp_path, lambda: "srun has ended" in log.read_text(), "the end")
    assert f"did not requeue job {cluster.first_job}" in log.read_text()
    assert shutil.which("scontrol")
