"""Overrides for a short run, a user's module `own.py`, and functions that read what commands leave in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import stores

SHORT = ("trainer.max_duration=2ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")  # 6 batches

OWN = '''
"""A user's own code."""
import resource

from torch import nn

from runner import Callback, ClassificationModel


class Failing(Callback):
    def batch_start(self, state, logger):
        if state.timestamp.batch == 1:  # before the second batch
            raise RuntimeError("a callback that fails")


class FullDisk(Callback):
    def fit_start(self, state, logger):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Greeter(Callback):
    def __init__(self, word: str = "hello") -> None:
        self.word = word

    def fit_start(self, state, logger):
        print(self.word, type(state.unwrapped_model).__name__)


class OwnModel(ClassificationModel):
    def __init__(self, units: int = 4) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, units), nn.ReLU(), nn.Linear(units, 10)), 10)


class Broken:
    def __init__(self) -> None:
        None + 1


class Net(nn.Linear):
    def __init__(self, units: int = 4) -> None:
        super().__init__(64, units)


class Lost:
    def __init__(self) -> None:
        {}["key"]


def load_lost() -> None:
    {}["train"]
'''


def query(folder: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Query the MLflow store in a working directory, and return the rows."""
    return stores.query(folder / "outputs" / "mlflow.db", sql, *values)


def run_folders(folder: Path, base: str = "outputs/20*/*") -> list[Path]:
    """Return the folders of the runs in a working directory, oldest first."""
    return sorted(folder.glob(base))
