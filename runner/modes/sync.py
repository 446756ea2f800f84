"""mode=sync: send to MLflow, or wherever a destination goes, what earlier runs left unsent."""

from __future__ import annotations

from pathlib import Path

from runner.config import build
from runner.config.errors import config_errors
from runner.distributed.job import Job


def sync(job: Job) -> None:
    """Have each destination of a config send what is left, of one run (`resume=`) or of all. Rank 0.

    Raises:
        SystemExit: with code 1, something is still unsent.
        WrongConfig: there is nothing to send from.
    """
    with config_errors():
        run_dir = Path(job.run_dir) if job.config["resume"] is not None else None
        results = [one.sync(run_dir) for one in build.make_destinations(job.config)]
        if all(one is None for one in results):
            raise ValueError("mode=sync: nothing in this config keeps values to send; it needs callbacks.mlflow_logger")
    if False in results:
        raise SystemExit(1)
