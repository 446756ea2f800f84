"""Made-up results of sweeps, for tables and pictures."""

from __future__ import annotations

import math
from pathlib import Path

from runner.records.result import Result
from runner.sweeps.sweep import Sweep


def result(objective: float | None, *overrides: str, status: str = "FINISHED", lower: bool = False) -> Result:
    """Return the result of a job with these overrides, named after their values."""
    metrics = {} if objective is None else {"train/acc": 0.5, "eval/acc": objective}
    name = "-".join(override.partition("=")[2] for override in overrides)
    return Result(status, name, "id", [*overrides, "model=mlp"], objective, "eval/acc", lower, metrics, seconds=1.234)


def sweep(direction: str = "", folder: Path = Path("folder")) -> Sweep:
    """Return a sweep whose jobs all have the model that was typed."""
    return Sweep(folder, "id", "name", "identity", ["model"], directions=[direction] if direction else [])


GRID = [
    result(0.5, "optimizer.lr=0.01", "seed=0"),
    result(0.7, "optimizer.lr=0.01", "seed=1"),
    result(0.9, "optimizer.lr=0.1", "seed=0"),
    result(math.nan, "optimizer.lr=0.1", "seed=1"),
    result(None, "optimizer.lr=1.0", "seed=0", status="FAILED"),
    result(0.8, "optimizer.lr=1.0", "seed=1"),
    result(0.4, "optimizer.lr=10.0", "seed=0"),
    result(0.4, "optimizer.lr=10.0", "seed=1"),
]
"""Four settings with two seeds each; a seed of the second setting is not finite, and a seed of the third has failed."""
