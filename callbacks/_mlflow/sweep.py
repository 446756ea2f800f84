"""The run of a sweep as a whole, beside those of its jobs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner.callbacks._mlflow.session import Session
from runner.callbacks._mlflow.spool import read_sent

if TYPE_CHECKING:
    from runner.destination import SweepSummary


def log_sweep(session: Session, summary: SweepSummary, nested: bool, timeout: float) -> None:
    """Log what came of a sweep, into the same run as when it was given before.

    Args:
        session: in the sweep's folder.
        summary: with status RUNNING before the first job.
        nested: whether jobs are to find the run when they begin; otherwise it is made at the end.
        timeout: seconds to wait for MLflow.
    """
    if summary.status == "RUNNING":
        if nested:
            session.begin()
            _wait_for_id(session, timeout)
        return
    session.begin()
    tags = {"runner.sweep": summary.sweep, "runner.sweep_summary": "true"}
    tags |= {f"best.{key}": value for key, value in summary.best.items()}
    session.append({"tags": tags})
    for name, (columns, rows) in summary.tables.items():
        session.append({"table": name, "columns": list(columns), "rows": [list(row) for row in rows]})
    for path in summary.files:
        session.append_artifact(path, "sweep")
    # A sweep that is given again has finished more jobs than before, or the same.
    session.append_metrics([(dict(summary.metrics), int(summary.metrics["sweep/finished"]), time.time())])
    session.close(summary.status, timeout)


def parent_tags(run_dir: Path, tracking_uri: str) -> dict[str, str]:
    """Return the tags that nest a job's run in the run of its sweep; none where there is no such run.

    Args:
        run_dir: of the job.
        tracking_uri: of the store.
    """
    run_id = read_sent(run_dir.parent / "mlflow", tracking_uri).run_id
    return {} if run_id is None else {"mlflow.parentRunId": run_id}


def _wait_for_id(session: Session, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while session.run_id is None and time.monotonic() < deadline:
        time.sleep(0.05)
