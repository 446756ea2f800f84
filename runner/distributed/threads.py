"""CPU threads: as many to each process as do not get in the way of the others on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SPINS = "50000"  # looks for work; by default it is 300,000, and with much less a run alone is slower


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_briefly() -> None:
    """Have torch's idle threads sleep soon, unless the user's environment says how they wait. Before torch is imported.

    They look for work for milliseconds otherwise, on cores that another process may need: two runs at once on one
    machine slow each other down by far more than they compute, see `benchmarks/together.py`.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def choose_threads(asked: int | None, processes: int, jobs: int) -> int | None:
    """Return the CPU threads of each process, None where they stay as they are.

    Args:
        asked: `launch.threads`, which goes before all else; then the user's own OMP_NUM_THREADS.
        processes: of the job, on this machine.
        jobs: at the same time, on this machine.
    """
    if asked is not None:
        return asked
    if os.environ.get("OMP_NUM_THREADS") not in (None, *_defaults_of_others(jobs)):
        return None
    return None if processes * jobs == 1 else max(1, cores() // (processes * jobs))


def _defaults_of_others(jobs: int) -> list[str]:
    """Return what torchrun and joblib set OMP_NUM_THREADS to where the user has not."""
    torchrun = ["1"] if "TORCHELASTIC_RUN_ID" in os.environ else []
    joblib = [str(max(1, cores() // jobs))] if jobs > 1 else []
    return torchrun + joblib


def parallel_jobs(hydra_config: Any) -> int:
    """Return how many jobs of a sweep run at the same time on this machine.

    Args:
        hydra_config: of a job.
    """
    launcher = hydra_config.launcher
    name = launcher.get("_target_", "").rpartition(".")[2]
    if name == "JoblibLauncher":
        return launcher.n_jobs if launcher.n_jobs > 0 else max(1, cores() + 1 + launcher.n_jobs)
    if name == "LocalLauncher":  # of submitit, which starts all at once: those without a result yet
        folders = [folder for folder in Path(launcher.submitit_folder).parent.iterdir() if folder.is_dir()]
        return max(1, sum(not any(folder.glob("*_result.pkl")) for folder in folders))
    return 1


@contextmanager
def with_threads(number: int | None) -> Iterator[None]:
    """Inside, torch computes with so many threads; None: with as many as before."""
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
