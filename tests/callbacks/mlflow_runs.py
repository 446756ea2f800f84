"""Runs that log to MLflow without training, and queries of the MLflow store."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stores
import torch
from torch import nn

from runner import ClassificationModel, Logger, State, Time, Timestamp
from runner.callbacks import MLflowLogger
from runner.training.precision import Precision


def query(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return rows of the default store."""
    return stores.query(Path("outputs/mlflow.db"), sql, *values)


def change(sql: str) -> None:
    """Change the default store, as a user of MLflow's UI might."""
    stores.change(Path("outputs/mlflow.db"), sql)


def points(key: str, run_id: str | None = None) -> list[tuple[int, float]]:
    """Return all points of a metric as (step, value), including duplicates."""
    rows = query("select step, value, is_nan from metrics where key = ? and run_uuid like ?", key, run_id or "%")
    return sorted((step, math.nan if is_nan else value) for step, value, is_nan in rows)


def make_state(run_dir: str | Path, **fields: Any) -> State:
    model = ClassificationModel(nn.Linear(2, 2), num_classes=2)
    return State(
        unwrapped_model=model,
        model=model,
        device=torch.device("cpu"),
        precision=Precision("fp32"),
        rank_zero_seed=0,
        run_name="a run",
        run_dir=Path(run_dir),
        max_duration=Time(1, "ep"),  # type: ignore[arg-type]
        **fields,
    )


@contextlib.contextmanager
def logging_to(
    destination: MLflowLogger, run_dir: str | Path, saved: dict[str, Any] | None = None, **fields: Any
) -> Iterator[tuple[State, Logger]]:
    """Yield the state and logger of a run, which fails if the block does; `saved` is the logger's checkpoint state."""
    state = make_state(run_dir, **fields)
    logger = Logger(state, [destination], interval=0.02)
    destination.init(state, logger)
    if saved is not None:
        destination.load_state_dict(saved)
    try:
        yield state, logger
    except BaseException as error:
        state.error = error
        raise
    finally:
        logger.flush()
        destination.close(state, logger)
        destination.post_close()
        logger.close()


def log_steps(state: State, logger: Logger, steps: range, value: float = 0.0) -> None:
    for step in steps:
        state.timestamp = Timestamp(batch=step)
        logger.log_metrics({"loss": value or float(step)})
