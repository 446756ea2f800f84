"""Processes: rank 0 composes the job, the others receive it; none but rank 0 ever runs Hydra."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from runner.addresses import without_credentials
from runner.distributed.launch_secret import VARIABLE, signed, use_secret, verified
from runner.distributed.signals import RankFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PARENT = "RUNNER_PARENT"
"""Environment variable of a rank or a run that was started from inside: the process id of who started it."""

MOST_PER_CORE = 16  # processes: more is a slip of the finger, and would bring the machine to a halt
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Launch:
    """How many processes train, on this machine.

    Attributes:
        nproc_per_node: processes; 'auto': as many as there are GPUs, at least 1.
        threads: CPU threads of each; None: by cores, processes and parallel jobs.
        grace: seconds after a SIGTERM in which each may finish its batch, save and close; then it ends as it is.

    Raises:
        ValueError: one of them is no such number.
    """

    nproc_per_node: int | str = 1
    threads: int | None = None
    grace: float = 300.0

    def __post_init__(self) -> None:
        if self.nproc_per_node != "auto" and not _is_count(self.nproc_per_node):
            raise ValueError(
                f"nproc_per_node={self.nproc_per_node!r}: must be a whole number of at least 1, or 'auto', "
                "as many as there are GPUs"
            )
        if self.threads is not None and not _is_count(self.threads):
            raise ValueError(
                f"threads={self.threads!r}: must be a whole number of at least 1, or null, by cores and processes"
            )
        if type(self.grace) not in (int, float) or not self.grace > 0:
            raise ValueError(f"grace={self.grace!r}: must be a number of seconds above 0")

    def processes(self) -> int:
        """Return the number of ranks on this machine.

        Raises:
            ValueError: torchrun has started another number of them.
        """
        asked = self.nproc_per_node
        if "RANK" in os.environ:
            started = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
            if asked not in (1, "auto", started):
                raise ValueError(
                    f"launch.nproc_per_node={asked!r}: torchrun has started {started} on this machine; "
                    "leave this key out, or run without torchrun"
                )
            return started
        if asked == "auto":
            import torch

            return max(1, torch.cuda.device_count())
        most = MOST_PER_CORE * (os.cpu_count() or 1)
        if int(asked) > most:
            raise ValueError(
                f"launch.nproc_per_node={asked!r}: at most {most} here, {MOST_PER_CORE} for each CPU core; "
                "usual is one for each GPU, or two or four in all"
            )
        return int(asked)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def check_launcher(name: str) -> None:
    """Raise where a launcher would start its jobs as ranks of the torchrun that this process is in.

    Args:
        name: of the launcher: basic, joblib, ...

    Raises:
        ValueError: it starts processes, which inherit the environment.
    """
    if name != "basic" and "RANK" in os.environ:
        raise ValueError(
            f"hydra/launcher={name}: starts processes of its own, which does not go with torchrun; use "
            "hydra/launcher=basic, or launch.nproc_per_node=... without torchrun"
        )


def check_gpus(processes: int, device: str) -> None:
    """Raise where processes would share a GPU, for each needs its own.

    Args:
        processes: on this machine.
        device: `trainer.device`.

    Raises:
        ValueError: there are fewer GPUs than processes, or the device names one GPU for all of them.
    """
    if processes > 1 and str(device).startswith("cuda:"):
        raise ValueError(
            f"trainer.device={device!r}: each of {processes} processes takes a GPU of its own; give 'auto' or 'cuda'"
        )
    if processes > 1 and device in ("auto", "cuda"):
        import torch

        gpus = torch.cuda.device_count()
        if torch.cuda.is_available() and processes > gpus:
            raise ValueError(
                f"launch.nproc_per_node={processes!r}: each process takes a GPU, and there are {gpus}; "
                f"give at most {gpus}, 'auto', or trainer.device=cpu"
            )


@dataclass(frozen=True)
class Job:
    """One run, composed: plain containers, so that it can be sent to other processes.

    `threads` is the number of CPU threads of each of its processes; None: as they have it. `may_be_over` says that
    training may have ended before, with only the end of the run left to do: it did not say that it finished.
    `arguments` are those that its record keeps: the overrides, and what else it was composed with. `label` is what each
    line that it prints begins with, where other jobs print at the same time. `code` are modules of a saved run, which
    are imported in place of those of now.
    """

    config: dict[str, Any]
    run_dir: str
    run_name: str
    overrides: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    may_be_over: bool = False
    arguments: list[str] = field(default_factory=list)
    label: str = ""
    code: dict[str, str] = field(default_factory=dict)


def print_failure(error: BaseException) -> None:
    """Print the trace of a failure, on stderr: of the rank that failed first."""
    if isinstance(error, RankFailed):
        print(without_credentials(str(error)), file=sys.stderr, flush=True)
    else:
        print(without_credentials("".join(traceback.format_exception(error))), end="", file=sys.stderr, flush=True)


@contextmanager
def environment(changes: Mapping[str, str] | Mapping[str, str | None]) -> Iterator[None]:
    """Inside, environment variables are set, or hidden where the value is None; as before on the way out."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def alone() -> Any:
    """Inside this context the process is the only one, whoever started it: no ranks and no process group."""
    return environment(dict.fromkeys(OF_A_RANK))


def kept_over_restarts(key: str, make: Callable[[], str]) -> str:
    """Return what `make` gives; under torchrun, what it gave before the workers were restarted. Rank 0."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return make()
    from runner.distributed.store import launch_store

    store = launch_store()
    if not store.check([key]):
        store.set(key, signed(key, make()))
    return verified(key, store.get(key))


def is_rank_zero() -> bool:
    """Whether this process composes jobs: it is alone, or rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


class Ranks:
    """The other ranks of a launch, which torchrun started, reached through the store in which all of them meet."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Store | None = None
        self._jobs = 0
        use_secret(os.environ.pop(VARIABLE, ""))  # no process that a rank starts is to have it

    def start(self, processes: int, threads: int | None) -> None:
        """Have as many ranks ready as a job needs, early, so that they import what they need meanwhile. Rank 0.

        Args:
            processes: ranks on this machine, with this one.
            threads: CPU threads of each, as in `Job`.
        """

    @contextmanager
    def sharing(self, job: Job) -> Iterator[None]:
        """Hand a job to all other ranks, which work on it while this one does inside the context. Rank 0."""
        self._put({"job": asdict(job)})
        yield

    def dismiss(self, exit_code: int) -> None:
        """Tell all other ranks that there are no more jobs. Rank 0."""
        self._put({"exit": exit_code})

    def receive(self) -> Iterator[Job]:
        """Yield jobs as rank 0 sends them; ends the process as it says, after the last. All ranks but 0.

        Raises:
            PermissionError: someone else sent one.
        """
        while True:
            name = f"message/{self._jobs}"
            message = json.loads(verified(name, self._connect().get(name)))
            self._count()
            if "exit" in message:
                raise SystemExit(message["exit"])
            yield Job(**message["job"])

    def report(self, error: Exception) -> None:
        """Tell the other ranks that this one has failed; the first has its trace printed. All ranks but 0."""
        from runner.distributed.store import first_failure

        is_first = not isinstance(first_failure(error), RankFailed)
        if is_first and PARENT not in os.environ:  # otherwise rank 0 prints it, as the last thing that it does
            print_failure(error)

    def hears_more(self, seconds: float = 5.0) -> bool:
        """Whether rank 0 has sent something by then: it has left the job that this rank could not do."""
        store, deadline = self._connect(), time.monotonic() + seconds
        while not (heard := store.check([f"message/{self._jobs}"])) and time.monotonic() < deadline:
            time.sleep(0.05)
        return heard

    def _put(self, message: dict[str, Any]) -> None:
        if self.size > 1:
            name = f"message/{self._jobs}"
            self._connect().set(name, signed(name, json.dumps(message)))
            self._count()

    def _count(self) -> None:
        from runner.distributed.store import begin_job

        self._jobs += 1
        begin_job(self._jobs)

    def _connect(self) -> Store:
        if self._store is None:
            from runner.distributed.store import meet

            self._store = meet()
        return self._store
