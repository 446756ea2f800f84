"""Choose how many CPU threads each process uses, so that processes on one machine do not slow each other down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SPINS = "50000"  # checks for work before an idle thread sleeps; default 300,000; far fewer slow down a single run


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_briefly() -> None:
    """Make torch's idle threads sleep soon, unless the environment sets a policy. Before torch is imported.

    By default they spin for milliseconds on cores that another process may need. Two runs on one machine then slow each
    other down far more than by their computation, see `benchmarks/together.py`.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


class Threads(NamedTuple):
    """How many CPU threads each process of a job uses.

    Attributes:
        number: number of threads; None does not change it.
        is_requested: whether a user asked for this number; otherwise a job with short steps uses one thread.
    """

    number: int | None = None
    is_requested: bool = False


DEFAULT_THREADS = Threads()


def choose_threads(threads: int | None, processes: int, jobs: int) -> Threads:
    """Return the number of CPU threads for each process.

    Args:
        threads: `launch.threads`, which takes precedence over the OMP_NUM_THREADS of the user.
        processes: processes of the job on this machine.
        jobs: jobs that run at the same time on this machine.
    """
    if threads is not None:
        return Threads(threads, is_requested=True)
    if os.environ.get("OMP_NUM_THREADS") not in (None, *_defaults_of_others(jobs)):
        return Threads(None, is_requested=True)
    return Threads(None if processes * jobs == 1 else max(1, cores() // (processes * jobs)))


def threads_now(number: int | None) -> int:
    """Return how many threads torch computes with if `number` is set; None: its current number."""
    import torch

    return torch.get_num_threads() if number is None else number


def _defaults_of_others(jobs: int) -> list[str]:
    """Return the values to which torchrun and joblib set OMP_NUM_THREADS if the user has not set it."""
    torchrun = ["1"] if "TORCHELASTIC_RUN_ID" in os.environ else []
    joblib = [str(max(1, cores() // jobs))] if jobs > 1 else []
    return torchrun + joblib


def parallel_jobs(hydra_config: Any) -> int:
    """Return how many jobs of a sweep run at the same time on this machine.

    Args:
        hydra_config: Hydra's config of a job.
    """
    launcher = hydra_config.launcher
    name = launcher.get("_target_", "").rpartition(".")[2]
    if name == "JoblibLauncher":
        return launcher.n_jobs if launcher.n_jobs > 0 else max(1, cores() + 1 + launcher.n_jobs)
    if name == "LocalLauncher":  # submitit starts all jobs at once; count those without a result
        folders = [folder for folder in Path(launcher.submitit_folder).parent.iterdir() if folder.is_dir()]
        return max(1, sum(not any(folder.glob("*_result.pkl")) for folder in folders))
    return 1


class _Scope:
    """The state of a `with_threads` context: remembers the number of threads to restore.

    Args:
        may_lower: whether `use_one_thread` has an effect, because no user asked for a number of threads.
    """

    def __init__(self, may_lower: bool) -> None:
        self.may_lower = may_lower
        self._before: int | None = None

    def set(self, number: int) -> None:
        import torch

        if self._before is None:
            self._before = torch.get_num_threads()
        torch.set_num_threads(number)

    def reset(self) -> None:
        if self._before is not None:
            self.set(self._before)


_scope = _Scope(may_lower=False)


@contextmanager
def with_threads(number: int | None, is_requested: bool) -> Iterator[None]:
    """Set the number of threads that torch computes with, see `Threads`, and restore it on exit."""
    global _scope
    outer = _scope
    _scope = _Scope(may_lower=not is_requested)
    if number is not None:
        _scope.set(number)
    try:
        yield
    finally:
        _scope.reset()
        _scope = outer


def use_threads(number: int) -> None:
    """Set the number of threads that torch computes with from now on, as if the user had asked for it."""
    _scope.may_lower = False
    _scope.set(number)


def use_one_thread() -> None:
    """Let torch compute with one thread until the end of the job, unless a user asked for another number."""
    if _scope.may_lower:
        _scope.set(1)
