"""A run found by its MLflow id: its folder on this machine, or its record out of its artifacts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import mlflow.exceptions
import requests
from mlflow import MlflowClient

from runner.callbacks._mlflow.limits import explain
from runner.callbacks._mlflow.order import SQLITE
from runner.callbacks._mlflow.writer import configure
from runner.files.whole import read_object


def find_run(run_id: str, tracking_uri: str, downloads: Path | None) -> Path | None:
    """Return the folder of a run, or `downloads` with its record in it; None where the store has no such run.

    Args:
        run_id: MLflow's.
        tracking_uri: of the store; a SQLite store that does not exist is not made.
        downloads: see `LoggerDestination.find_run`.

    Raises:
        ValueError: the store cannot be read, the run is deleted, or what is asked of it is not there.
    """
    if tracking_uri.startswith(SQLITE) and not Path(tracking_uri.removeprefix(SQLITE)).exists():
        return None
    configure()
    client = MlflowClient(tracking_uri)
    try:
        run = client.get_run(run_id)
    except mlflow.exceptions.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise ValueError(f"MLflow: {explain(error, tracking_uri)}") from error
    if run.info.lifecycle_stage == "deleted":
        raise ValueError(f"MLflow run {run_id} is deleted: `mlflow runs restore --run-id {run_id}` brings it back")
    name = run.data.tags.get("runner.run_dir")
    with suppress(OSError):  # the folder may be in somebody else's home
        if name is not None and read_object(Path(name) / "mlflow" / "sent.json").get("run_id") == run_id:
            return Path(name)
    if downloads is None:
        where = f"{name} on {run.data.tags.get('host')}" if name else "unknown"
        raise ValueError(
            f"MLflow run {run_id}: its folder with the checkpoints ({where}) is not here, or may not be read; "
            "give resume= a folder, or make the run again with rerun="
        )
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        if not client.list_artifacts(run_id, "record"):
            raise ValueError(f"MLflow run {run_id} has no record among its artifacts: it cannot be made again")
        for file in Path(client.download_artifacts(run_id, "record", str(downloads))).iterdir():
            file.rename(downloads / file.name)
    except (mlflow.exceptions.MlflowException, requests.RequestException, OSError) as error:
        raise ValueError(f"record of MLflow run {run_id}: {explain(error, tracking_uri)}") from error
    return downloads
