"""Small runs with a CheckpointSaver, and the checkpoints in its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer, is_complete
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader


class Model(ClassificationModel):
    """A small classifier whose evaluations follow a script, if given."""

    def __init__(self, script: tuple[float, ...] = ()):
        linear = nn.Linear(3, 2)
        nn.init.constant_(linear.weight, 0.1)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, 2)
        self.script = list(script)

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return loss * 0 + self.script.pop(0) if self.script and not self.training else loss


def make_trainer(run_dir: Path, saver: CheckpointSaver, *others: Callback, script=(), **arguments: Any) -> Trainer:
    inputs = torch.arange(24.0).view(8, 3) / 24
    data = TensorLoader(inputs, torch.arange(8) % 2, batch_size=2, shuffle=True)
    defaults: dict[str, Any] = {
        "model": Model(script),
        "train_dataloader": data,
        "eval_dataloader": TensorLoader(inputs, torch.arange(8) % 2, batch_size=8, shuffle=False),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "max_duration": "4ep",
        "callbacks": [saver, *others],
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(**(defaults | arguments))


def fit(run_dir: Path, saver: CheckpointSaver, *others: Callback, **arguments: Any) -> Trainer:
    with make_trainer(run_dir, saver, *others, **arguments) as trainer:
        trainer.fit()
    return trainer


def saved(run_dir: Path) -> set[str]:
    """Return the names in the folder without links, after checking that all are complete checkpoints."""
    folder = run_dir / "checkpoints"
    names = {path.name for path in folder.iterdir() if not path.is_symlink()}
    assert all(is_complete(folder / name) for name in names)
    return names


def target(run_dir: Path, link: str) -> str:
    return os.readlink(run_dir / "checkpoints" / link)
