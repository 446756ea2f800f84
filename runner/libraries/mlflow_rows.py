"""Write metrics directly into the tables of MLflow's SQLite store; MLflow makes an object for each, which is slower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from runner.libraries.shortcuts import is_enabled

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

LARGEST = 1.7976931348623157e308  # MLflow stores it in place of infinity
VALUES = "(key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)"
INSERT = f"""
INSERT INTO metrics {VALUES} ON CONFLICT (key, timestamp, step, run_uuid, value, is_nan) DO NOTHING
"""
INSERT_LATEST = f"""
INSERT INTO latest_metrics {VALUES} ON CONFLICT (key, run_uuid)
DO UPDATE SET value = excluded.value, timestamp = excluded.timestamp, step = excluded.step, is_nan = excluded.is_nan
WHERE (excluded.step, excluded.timestamp, excluded.value)
> (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)
"""
STEP_TIME_VALUE = itemgetter(3, 2, 1)  # of a row of VALUES


def log_metrics(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    """Log at most 1000 metrics with valid names; a SQL store keeps each once, however often it is logged.

    Raises:
        Exception: any error of `MlflowClient.log_batch`.
    """
    store: Any = getattr(getattr(client, "_tracking_client", None), "store", None)
    are_plain = all(type(metric.value) is float and metric.timestamp >= 0 for metric in metrics)
    if is_enabled("metrics") and getattr(store, "db_type", None) == "sqlite" and are_plain:
        with suppress(Exception):  # the tables of another version may differ; any other failure will recur below
            if _insert(store, run_id, metrics):
                return
    client.log_batch(run_id, metrics=metrics)


def _insert(store: Any, run_id: str, metrics: Sequence[Metric]) -> bool:
    """Insert metrics unless the run is deleted, and return whether it was done."""
    rows: list[tuple[Any, ...]] = []
    latest: dict[str, tuple[Any, ...]] = {}
    for metric in metrics:
        is_nan = math.isnan(metric.value)
        value = 0.0 if is_nan else max(-LARGEST, min(metric.value, LARGEST))
        row = (metric.key, value, metric.timestamp, metric.step, is_nan, run_id)
        rows.append(row)
        latest[metric.key] = max(latest.get(metric.key, row), row, key=STEP_TIME_VALUE)  # the first of equal rows
    with store.ManagedSessionMaker(read_only=False) as session:
        connection = session.connection()
        stage = connection.exec_driver_sql("SELECT lifecycle_stage FROM runs WHERE run_uuid = ?", (run_id,)).scalar()
        if stage != "active":
            return False
        connection.exec_driver_sql(INSERT, rows)
        connection.exec_driver_sql(INSERT_LATEST, [*latest.values()])
    return True
