"""Metrics written directly into a SQLite store are stored as MLflow stores them."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import stores

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and its imports


def test_written_tables_equal_those_of_mlflow(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    from runner.libraries.mlflow_rows import log_metrics

    values = [1.0, math.nan, math.inf, -math.inf, 0.1 + 0.2, 5e-324, -0.0]
    calls = [
        [Metric("acc", 1, 3, 2)],  # an int goes through the public API
        [Metric("loss", value, 10 + number, number // 2) for number, value in enumerate(values)],
        [Metric("loss", 7.0, 5, 2), Metric("acc", 0.5, 5, 2), Metric("acc", 0.25, 5, 2), Metric("acc", 0.9, 4, 2)],
        [Metric("loss", 1.0, 10, 0), Metric("loss", 2.0, 99, 9), Metric("loss", 2.0, 99, 9), Metric("acc", 0.1, 6, 2)],
    ]
    tables: list[list[Any]] = []
    for public in ("0", "metrics"):
        monkeypatch.setenv("RUNNER_PUBLIC_ONLY", public)
        database = tmp_path / f"{public}.db"
        shutil.copy(empty_store, database)
        client = MlflowClient(f"sqlite:///{database}")
        run_id = client.create_run("0").info.run_id
        for call in calls:
            log_metrics(client, run_id, call)
        columns = "select key, value, timestamp, step, is_nan, run_uuid = ? from"
        tables.append(
            [sorted(stores.query(database, f"{columns} {name}", run_id)) for name in ("metrics", "latest_metrics")]
        )
    assert tables[0] == tables[1] and len(tables[0][0]) == 14 and len(tables[0][1]) == 2


def test_a_deleted_run_and_values_that_are_no_numbers_raise_the_errors_of_mlflow(
    empty_store: Path, tmp_path: Path
) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    from runner.libraries.mlflow_rows import log_metrics

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = client.create_run("0").info.run_id
    with pytest.raises(MlflowException, match="Invalid value"):
        log_metrics(client, run_id, [Metric("loss", "high", 1, 1)])  # type: ignore[arg-type]
    client.delete_run(run_id)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        log_metrics(client, run_id, [Metric("loss", 1.0, 1, 1)])
    assert not stores.query(tmp_path / "mlflow.db", "select * from metrics")
