"""Start ranks and give them work: rank 0 alone runs Hydra, composes the jobs and sends them to the others."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.distributed import slurm
from runner.distributed.environment import PARENT
from runner.distributed.launch_secret import VARIABLE, signed, use_secret, verified
from runner.failures.checks import check_flag, check_number, check_whole, refuse_if
from runner.failures.errors import RankFailed, wrong_argument
from runner.timing.time import Time, TimeUnit

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

PARTING = 5.0  # maximum seconds that rank 0 waits for other ranks to learn that there are no more jobs
MOST_PER_CORE = 16  # processes; more is most likely a typo, and would bring the machine to a halt


@dataclass(frozen=True)
class Launch:
    """How many processes train on this machine, and how.

    Attributes:
        nproc_per_node: number of processes; 'auto' is one for each GPU, and one without a GPU.
        threads: CPU threads of each process; None divides the cores among processes and parallel jobs.
        grace: seconds that a process has after a SIGTERM to finish its batch, save and close before it is ended.
        patience: how long all ranks may stand still before the run ends with exit code 75, as a time string such as
            '10m', or in seconds; None: forever.
        requeue: whether a Slurm job goes back into the queue after SIGUSR1 or SIGUSR2, once its checkpoint is written,
            or after the machine failed, and is resumed when it runs again; None: only if submitit started it. Outside
            Slurm it has no effect, and a run that sets it warns.
        restarts: how often in a row, without a newer checkpoint in between, a run restarts from its newest checkpoint
            after the machine failed; 0: never. It has no effect under torchrun and Slurm, which have restarts of their
            own.

    Raises:
        ValueError: a number is out of range, or of the wrong type.
    """

    nproc_per_node: int | str = 1
    threads: int | None = None
    grace: float = 300.0
    patience: str | float | None = "10m"
    requeue: bool | None = None
    restarts: int = 3

    def __post_init__(self) -> None:
        if self.nproc_per_node != "auto":
            check_whole("nproc_per_node", self.nproc_per_node, 1, "'auto', for all GPUs, or a whole number")
        check_whole("threads", self.threads, 1, none="a share of the cores")
        check_number("grace", self.grace, "(0, inf]", "a number of seconds")
        if not self.patience_seconds > 0:
            raise wrong_argument(
                "patience", self.patience, "must be a time above 0, such as '10m', or null for no limit"
            )
        check_flag("requeue", self.requeue, "requeues submitit's jobs")

        if type(self.restarts) is not int or self.restarts < 0:
            raise wrong_argument("restarts", self.restarts, "must be a whole number, 0 or more")

    @property
    def patience_seconds(self) -> float:
        """The patience in seconds; infinity without a limit."""
        if self.patience is None:
            return math.inf
        if type(self.patience) in (int, float):
            return float(self.patience)
        time = Time.parse(self.patience, "patience")  # type: ignore[arg-type]
        return float(time.value) if time.unit is TimeUnit.SECOND else 0.0

    @property
    def requeues(self) -> bool:
        """Whether this process belongs to a job that is requeued."""
        return slurm.was_started_by_submitit() if self.requeue is None else self.requeue and slurm.is_job()

    def processes(self) -> int:
        """Return the number of ranks on this machine."""
        requested = self.nproc_per_node
        if "RANK" in os.environ:
            started = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
            reason = f"torchrun or srun has started {started} on this machine; leave this key out, or run without them"
            refuse_if(requested not in (1, "auto", started), "launch.nproc_per_node", requested, reason)
            return started
        if requested == "auto":
            import torch

            return max(1, torch.cuda.device_count())
        most = MOST_PER_CORE * (os.cpu_count() or 1)
        if int(requested) > most:
            raise wrong_argument(
                "launch.nproc_per_node",
                requested,
                f"at most {most} here, {MOST_PER_CORE} for each CPU core; the usual choice is one per GPU, or two "
                "or four in total",
            )
        return int(requested)


def check_launcher(name: str) -> None:
    """Raise an error if this process is a rank of torchrun and a launcher would start processes of its own."""
    if name != "basic" and "RANK" in os.environ:
        raise ValueError(
            f"hydra/launcher={name}: starts its own processes, which does not work under torchrun; use "
            "hydra/launcher=basic, or launch.nproc_per_node=... without torchrun"
        )


def check_gpus(processes: int, device: str) -> None:
    """Raise an error if processes would share a GPU."""
    reason = f"each of {processes} processes needs its own GPU; give 'auto' or 'cuda'"
    refuse_if(processes > 1 and str(device).startswith("cuda:"), "trainer.device", device, reason)
    if processes > 1 and device in ("auto", "cuda"):
        import torch

        gpus = torch.cuda.device_count()
        if torch.cuda.is_available() and processes > gpus:
            raise wrong_argument(
                "launch.nproc_per_node",
                processes,
                f"each process needs its own GPU, and there are {gpus}; give at most {gpus}, 'auto', or "
                "trainer.device=cpu",
            )


class Ranks:
    """The ranks of a launch by torchrun, which exchange messages through a store that all of them can reach."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Store | None = None
        self._messages = 0
        use_secret(os.environ.pop(VARIABLE, ""))  # processes that a rank starts must not inherit it

    def start(self, processes: int, threads: int | None) -> None:
        """Start the ranks that a job needs, unless they are running. Rank 0.

        Call it early, so that the ranks import their libraries while rank 0 still checks the job. `processes` includes
        this one; `threads=None` does not change the CPU threads of the ranks.
        """

    @contextmanager
    def sharing(self, job: Mapping[str, Any]) -> Iterator[None]:
        """Send a job to all other ranks, which work on it while rank 0 does so within this context. Rank 0."""
        self._send({"job": job})
        yield

    def dismiss(self, exit_code: int) -> None:
        """Tell all other ranks that there are no more jobs, and wait until they know. Rank 0, which may host the store.

        The wait ends after `PARTING` seconds, because a rank may have been killed.
        """
        self._send({"exit": exit_code})
        keys = [f"left/{rank}" for rank in range(1, self.size)]
        deadline = time.monotonic() + PARTING
        with suppress(RuntimeError):  # another process hosts the store, and has ended
            while keys and not self._connect().check(keys) and time.monotonic() < deadline:
                time.sleep(0.02)

    def leave(self) -> None:
        """Tell rank 0 that this rank no longer needs the store. All ranks but 0."""
        if self._store is not None:  # otherwise connecting could take long, and rank 0 may have ended
            with suppress(RuntimeError):  # rank 0 hosts the store and may have stopped waiting
                self._store.set(f"left/{self.rank}", "")

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the jobs that rank 0 sends. All ranks but 0.

        Raises:
            PermissionError: a message was not sent by this launch.
            SystemExit: rank 0 has no more jobs; the exit code is the one that it sent.
        """
        while True:
            name = f"message/{self._messages}"
            message = json.loads(verified(name, self._connect().get(name)))
            self._begin_next()
            if "exit" in message:
                raise SystemExit(message["exit"])
            yield message["job"]

    def report(self, error: Exception) -> bool:
        """Tell the other ranks that this one failed, and return whether it should print the error. All ranks but 0.

        The first rank that fails should, unless rank 0 started it: then rank 0 prints the trace before it ends.
        """
        from runner.distributed.store import first_failure

        is_first = not isinstance(first_failure(error), RankFailed)
        return is_first and PARENT not in os.environ

    def has_next_message(self, seconds: float = 5.0) -> bool:
        """Wait for the next message of rank 0, and return whether it came: if so, rank 0 has ended this job."""
        store = self._connect()
        deadline = time.monotonic() + seconds
        while not (has_arrived := store.check([f"message/{self._messages}"])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return has_arrived

    def _send(self, message: dict[str, Any]) -> None:
        if self.size > 1:
            name = f"message/{self._messages}"
            self._connect().set(name, signed(name, json.dumps(message)))
            self._begin_next()

    def _begin_next(self) -> None:
        """Count a message, and use the next job's keys in the store from now on."""
        from runner.distributed.store import begin_job

        self._messages += 1
        begin_job(self._messages)

    def _connect(self) -> Store:
        if self._store is None:
            from runner.distributed.store import current_store

            self._store = current_store()
        return self._store
