"""Folders of runs for tests and for `benchmarks/runs.py`: results and configs, without any training."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

CONFIG = {
    "seed": 0,
    "model": {"_target_": "runner.ClassificationModel", "module": {"_target_": "runner.models.ResNet8", "width": 16}},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "betas": [0.9, 0.95]},
    "callbacks": {"lr_monitor": {"_target_": "runner.callbacks.LRMonitor"}},
}
EVALUATION = {"eval:data": "d1", "eval:size": "597", "eval/loss": "c1", "eval/MulticlassAccuracy": "c2"}
TRAINER = {"max_duration": "2ep"}


def write_run(
    folder: Path, *, loss: float = 0.5, lr: float = 0.1, model: str = "resnet8", seed: int = 0, **facts: Any
) -> Path:
    """Write the folder of a run that has ended; `config` among the facts are sections of its config."""
    folder.mkdir(parents=True)
    config = {**CONFIG, "seed": seed, "optimizer": {**CONFIG["optimizer"], "lr": lr}}  # type: ignore[dict-item]
    config |= facts.pop("config", {})
    (folder / "config.yaml").write_text(yaml.dump(config, Dumper=yaml.CSafeDumper, sort_keys=False))
    given: dict[str, Any] = {
        "status": "FINISHED",
        "name": folder.name,
        "identity": "",
        "overrides": [f"optimizer.lr={lr}", f"seed={seed}"],
        "objective": 1 - loss,
        "objective_name": "eval/MulticlassAccuracy",
        "metrics": {"train/MulticlassAccuracy": 1.0, "eval/MulticlassAccuracy": 1 - loss, "eval/loss": loss},
        "choices": {"model": model, "data": "digits"},
        "seconds": 12.0,
        "started": 1.7e9,
    }
    (folder / "result.json").write_text(json.dumps(given | facts))  # without the sync, for thousands of runs
    return folder


def write_seeds(folder: Path, values: list[float], first: int = 0, **facts: Any) -> None:
    """Write a run with each accuracy, under the seeds from `first` on."""
    given = {"evaluation": EVALUATION, "lower": ["eval/loss"], "config": {"trainer": TRAINER}} | facts
    for seed, value in enumerate(values, start=first):
        write_run(folder / f"seed{seed}", loss=1 - value, seed=seed, **dict(given))


def write_many(outputs: Path, count: int) -> None:
    """Write a number of runs, a third of them jobs of sweeps."""
    draw = random.Random(0)
    for number in range(count):
        name = f"{number // 3600 + 9:02}-{number // 60 % 60:02}-{number % 60:02}"
        folder = outputs / "2026-11-23" / name
        if number % 3 == 0:
            folder = outputs / "sweeps" / "2026-11-23" / f"{number // 300:02}-00-00" / f"job-{number}"
        facts = {"lr": draw.choice([0.01, 0.03, 0.1]), "model": draw.choice(["mlp", "resnet8"])}
        write_run(folder, loss=draw.random(), started=1.7e9 + number, **facts)
