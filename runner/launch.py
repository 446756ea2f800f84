"""Processes: rank 0 composes the job, the others receive it; none but rank 0 ever runs Hydra."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Launch:
    """How many processes train, on this machine.

    Attributes:
        nproc_per_node: processes; 'auto': as many as there are GPUs, at least 1.
        threads: CPU threads of each; None: by cores, processes and parallel jobs.
    """

    nproc_per_node: int | str = 1
    threads: int | None = None


@dataclass(frozen=True)
class Job:
    """One run, composed: plain containers, so that it can be sent to other processes."""

    config: dict[str, Any]
    run_dir: str
    run_name: str
    overrides: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


_ranks: Ranks | None = None


def ranks() -> Ranks:
    """Return the ranks of this process's launch; the same object at every call."""
    global _ranks
    if _ranks is None:
        _ranks = Ranks()
    return _ranks


def is_rank_zero() -> bool:
    """Whether this process composes jobs: it is alone, or rank 0 of those that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


class Ranks:
    """The other ranks of a launch, reached through the store of the rendezvous. Alone, everything here does nothing."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Store | None = None
        self._jobs = 0

    def send(self, job: Job) -> None:
        """Hand a job to all other ranks."""
        self._put({"job": asdict(job)})

    def dismiss(self, exit_code: int) -> None:
        """Tell all other ranks that there are no more jobs."""
        self._put({"exit": exit_code})

    def receive(self) -> Iterator[Job]:
        """Yield jobs as rank 0 sends them; ends the process as it says, after the last."""
        while True:
            message = json.loads(self._connect().get(f"job/{self._jobs}"))
            self._jobs += 1
            if "exit" in message:
                raise SystemExit(message["exit"])
            yield Job(**message["job"])

    def hears_more(self, seconds: float = 10.0) -> bool:
        """Whether rank 0 has sent something by then: it has left the job that this rank could not do."""
        try:
            self._connect().wait([f"job/{self._jobs}"], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _put(self, message: dict[str, Any]) -> None:
        if self.size > 1:
            self._connect().set(f"job/{self._jobs}", json.dumps(message))
            self._jobs += 1

    def _connect(self) -> Store:
        if self._store is None:
            from torch._C._distributed_c10d import PrefixStore

            from runner.distributed import meet

            self._store = PrefixStore("jobs", meet())
        return self._store
