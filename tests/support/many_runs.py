"""Writes folders of runs, with results and configs but without training, for tests and `benchmarks/runs.py`."""

from __future__ import annotations

import itertools
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
COUNTER = itertools.count()


def write_run(
    folder: Path, *, loss: float = 0.5, lr: float = 0.1, model: str = "resnet8", seed: int = 0, **facts: Any
) -> Path:
    """Write the folder of a finished run, and return it.

    Args:
        folder: the folder to create.
        loss: evaluation loss; the accuracy is 1 - loss.
        lr: learning rate in the config.
        model: name of the chosen model.
        seed: seed in the config.
        **facts: fields of `result.json` to replace or add, and `config` with sections of the config to replace.
    """
    folder.mkdir(parents=True)
    config = {**CONFIG, "seed": seed, "optimizer": {**CONFIG["optimizer"], "lr": lr}}  # type: ignore[dict-item]
    config |= facts.pop("config", {})
    (folder / "config.yaml").write_text(yaml.dump(config, Dumper=yaml.CSafeDumper, sort_keys=False))
    defaults: dict[str, Any] = {
        "status": "FINISHED",
        "name": folder.name,
        "identity": "",
        "overrides": [f"optimizer.lr={lr}", f"seed={seed}"],
        "objective": 1 - loss,
        "objective_name": "eval/MulticlassAccuracy",
        "metrics": {"train/MulticlassAccuracy": 1.0, "eval/MulticlassAccuracy": 1 - loss, "eval/loss": loss},
        "choices": {"model": model, "data": "digits"},
        "seconds": 12.0,
        "started": 1.7e9 + next(COUNTER) / 1024,  # two runs never begin at once in one process
    }
    (folder / "result.json").write_text(json.dumps(defaults | facts))  # without fsync, because there may be thousands
    return folder


def write_seeds(folder: Path, values: list[float], first: int = 0, **facts: Any) -> None:
    """Write a run for each accuracy, with seeds that count up from `first`."""
    defaults = {"evaluation": EVALUATION, "lower": ["eval/loss"], "config": {"trainer": TRAINER}}
    for seed, value in enumerate(values, start=first):
        write_run(folder / f"seed{seed}", loss=1 - value, seed=seed, **(defaults | facts))


def write_many(outputs: Path, count: int) -> None:
    """Write this many runs, a third of them as jobs of sweeps."""
    generator = random.Random(0)
    for number in range(count):
        name = f"{number // 3600 + 9:02}-{number // 60 % 60:02}-{number % 60:02}"
        folder = outputs / "2026-11-23" / name
        if number % 3 == 0:
            folder = outputs / "sweeps" / "2026-11-23" / f"{number // 300:02}-00-00" / f"job-{number}"
        facts = {"lr": generator.choice([0.01, 0.03, 0.1]), "model": generator.choice(["mlp", "resnet8"])}
        write_run(folder, loss=generator.random(), started=1.7e9 + number, **facts)
