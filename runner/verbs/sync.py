"""`runner sync`: sends MLflow, or any other destination, the data that earlier runs could not send.

It sends the unsent data of all runs, or only of RUN. The exit code is 1 if some data could still not be sent.
"""

from __future__ import annotations

from pathlib import Path

from runner.config import build
from runner.config.errors import config_errors
from runner.records.job import Job
from runner.terminal.answer import set_fields


def run(job: Job) -> None:
    """Let each destination of a config send its unsent data. Rank 0.

    Raises:
        SystemExit: some data could still not be sent; the exit code is 1.
        WrongConfig: no destination of this config keeps unsent values.
    """
    with config_errors():
        run_dir = None if job.command.run is None else Path(job.run_dir)
        results = [destination.sync(run_dir) for destination in build.make_destinations(job.experiment.callbacks)]
        if all(result is None for result in results):
            raise ValueError("sync: no callback here keeps unsent values; it needs callbacks.mlflow_logger")
    set_fields(result={"sent": False not in results})
    if False in results:
        set_fields(reason="something could still not be sent")
        raise SystemExit(1)
