"""Reads the runs of any MLflow experiment. Nothing is created or changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from runner.libraries.mlflow_failures import explain

DEFAULT = "sqlite:///outputs/mlflow.db"
PAGE = 1000  # runs in a reply
LIMITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}  # seconds


def search_runs(name: str, condition: str) -> tuple[str, list[Any]]:
    """Return the address of the store and the runs of an experiment, the oldest first.

    The store is `$MLFLOW_TRACKING_URI`, or else `outputs/mlflow.db`, as for runs that are logged.

    Args:
        name: name of the experiment.
        condition: a filter in MLflow's language; empty for all runs.

    Raises:
        ValueError: the store cannot be read, or has no such experiment.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT
    scheme, is_file, path = uri.partition("sqlite:///")
    if is_file and not scheme:
        database = Path.cwd() / unquote(path.partition("?")[0])
        if not database.is_file():
            raise ValueError(f"there is no store {database}; set MLFLOW_TRACKING_URI to its address")
        quoted = str(database).replace("%", "%25").replace("?", "%3F")
        uri = f"sqlite{'+pysqlite' * ('%' in quoted)}:///{quoted}"  # only with a driver does MLflow unquote it
    for setting, value in {**LIMITS, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():
        os.environ.setdefault(setting, value)  # before the import, which reads them
    from mlflow import MlflowClient

    try:
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(name)
        known = [other.name for other in client.search_experiments(max_results=20)]
        runs: list[Any] = []
        token = None
        while experiment is not None:
            ids, order = [experiment.experiment_id], ["attributes.start_time ASC"]
            page = client.search_runs(ids, condition, max_results=PAGE, order_by=order, page_token=token)
            runs += page
            if not (token := page.token):
                return uri, runs
    except Exception as error:  # of any HTTP or SQL library
        raise ValueError(explain(error, uri)) from None
    raise ValueError(f"no such experiment; there are: {', '.join(known)}")
