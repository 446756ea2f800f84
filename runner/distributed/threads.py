"""CPU threads: how many each process uses, so that processes on one machine do not slow each other down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SPINS = "50000"  # an idle thread looks for work this often; the default is 300,000, and far fewer slow a single run


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_briefly() -> None:
    """Make torch's idle threads go to sleep soon, unless the environment sets a policy. Before torch is imported.

    By default they spin for milliseconds on cores that another process may need. Two runs on one machine then slow each
    other down by far more than what they compute, see `benchmarks/together.py`.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def choose_threads(asked: int | None, processes: int, jobs: int) -> int | None:
    """Return the number of CPU threads for each process, or None to leave it unchanged.

    Args:
        asked: `launch.threads`, which takes precedence over the user's own OMP_NUM_THREADS.
        processes: processes of the job on this machine.
        jobs: jobs that run at the same time on this machine.
    """
    if asked is not None:
        return asked
    if os.environ.get("OMP_NUM_THREADS") not in (None, *_defaults_of_others(jobs)):
        return None
    return None if processes * jobs == 1 else max(1, cores() // (processes * jobs))


def _defaults_of_others(jobs: int) -> list[str]:
    """Return the values that torchrun and joblib give OMP_NUM_THREADS if the user has not set it."""
    torchrun = ["1"] if "TORCHELASTIC_RUN_ID" in os.environ else []
    joblib = [str(max(1, cores() // jobs))] if jobs > 1 else []
    return torchrun + joblib


def parallel_jobs(hydra_config: Any) -> int:
    """Return how many jobs of a sweep run at the same time on this machine.

    Args:
        hydra_config: Hydra's config of one job.
    """
    launcher = hydra_config.launcher
    name = launcher.get("_target_", "").rpartition(".")[2]
    if name == "JoblibLauncher":
        return launcher.n_jobs if launcher.n_jobs > 0 else max(1, cores() + 1 + launcher.n_jobs)
    if name == "LocalLauncher":  # submitit starts all jobs at once: count those without a result
        folders = [folder for folder in Path(launcher.submitit_folder).parent.iterdir() if folder.is_dir()]
        return max(1, sum(not any(folder.glob("*_result.pkl")) for folder in folders))
    return 1


@contextmanager
def with_threads(number: int | None) -> Iterator[None]:
    """Within the context, let torch compute with this number of threads; None leaves it unchanged."""
    if number is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
