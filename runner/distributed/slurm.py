"""Slurm jobs: ranks started by srun, what a job remembers across restarts, and requeueing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runner.files.whole import read_object, write_atomically

FOLDER = Path("outputs", ".slurm")
"""Folder for what jobs remember, relative to the working directory; all attempts of a job share it."""
PATIENCE = 60.0  # seconds to wait for Slurm
IDLE_ATTEMPTS = 3
"""Number of attempts in a row without progress after which a job is not requeued."""


def is_job() -> bool:
    """Return whether this process belongs to a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def was_started_by_submitit() -> bool:
    """Return whether submitit started this Slurm job, as Hydra's submitit launcher does."""
    return is_job() and os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def use_tasks_as_ranks() -> bool:
    """Make this process a rank if srun started it as one of several tasks, and return whether it did.

    `MASTER_ADDR` and `MASTER_PORT` are taken from the environment, or else are the step's first host and a port derived
    from the job, step and restart numbers.

    Raises:
        OSError: `scontrol`, which lists the hosts, cannot be run.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in os.environ or tasks == "1":
        return False
    node = int(os.environ["SLURM_NODEID"])
    job = os.environ["SLURM_JOB_ID"]
    attempt = f"{job}.{os.environ['SLURM_STEP_ID']}.{restarts()}"
    os.environ |= {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or _first_host(os.environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(20_000 + int(_digest(attempt), 16) % 10_000),
    }
    return True


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node, as Slurm writes it: '2(x3),1' is [2, 2, 2, 1]."""
    counts = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts


def _first_host(nodes: str) -> str:
    command = ["scontrol", "show", "hostnames", nodes]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.split()[0]


def restarts() -> int:
    """Return how often Slurm has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


_memory: dict[str, str] | None = None


def keep_across_requeues(key: str, make: Callable[[], str]) -> str:
    """Return the result of `make`; within a Slurm job, its first result for the key, even after requeues. Rank 0.

    Each command of a job has its own values, so a job may train several runs in a row.
    """
    if not is_job():
        return make()
    memory = _read_memory()
    if key not in memory:
        memory[key] = make()
        _write_memory()
    return memory[key]


def _read_memory() -> dict[str, str]:
    global _memory
    if _memory is None:
        _memory = {name: str(value) for name, value in read_object(_file()).items()} if restarts() else {}
    return _memory


def _write_memory() -> None:
    write_atomically(_file(), json.dumps(_memory, indent=1))


def _file() -> Path:
    return FOLDER / f"{os.environ['SLURM_JOB_ID']}-{_digest(' '.join(sys.orig_argv[1:]))}.json"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def check_progress(trained: bool) -> None:
    """Record at the end of an attempt whether it made progress. Rank 0.

    Raises:
        RuntimeError: several attempts in a row made no progress, so the job must not be requeued again.
    """
    if not is_job():
        return
    memory = _read_memory()
    idle = 0 if trained else int(memory.get("idle", "0")) + 1
    memory["idle"] = str(idle)
    _write_memory()
    if idle >= IDLE_ATTEMPTS:
        raise RuntimeError(
            f"{idle} attempts in a row made no progress, so the job is not requeued: its time limit may be too "
            "short to start in, or the machine keeps failing"
        )


_is_requested = False


def request_requeue() -> None:
    """Make `requeue_if_requested` requeue this process's job at the end of the command. Rank 0."""
    global _is_requested
    _is_requested = True


def requeue_if_requested() -> None:
    """Requeue this process's job if `request_requeue` was called."""
    if _is_requested:
        requeue()


def requeue() -> None:
    """Put this process's job back into the queue, and wait for Slurm to end this process. Rank 0.

    Slurm starts it again once its credentials have expired, after two minutes unless `AuthInfo` sets another time.

    Raises:
        OSError: Slurm did not requeue the job.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm ends the rest of this attempt with SIGTERM
    job = os.environ["SLURM_JOB_ID"]
    print(f"requeued: Slurm job {job} resumes from its checkpoint when it starts again", flush=True)
    result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=PATIENCE)
    if result.returncode > 0:  # below 0: Slurm has already killed scontrol
        raise OSError(f"Slurm did not requeue job {job}: {result.stderr.strip()}")
    time.sleep(PATIENCE)
