"""A private Slurm of two nodes on this machine, with a key, a folder and ports of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
NODES = ("n1", "n2")
PATIENCE = 60.0  # seconds for a daemon to answer


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
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
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
        deadline = time.monotonic() + PATIENCE
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
