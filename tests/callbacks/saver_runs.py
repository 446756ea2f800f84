"""Tiny runs with a CheckpointSaver, and the names of their checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer, is_complete
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader


class Model(ClassificationModel):
    """A linear classifier; the next value of `script`, if there is one, is the loss of an evaluation."""

    def __init__(self, script: tuple[float, ...] = ()):
        linear = nn.Linear(3, 2)
        nn.init.constant_(linear.weight, 0.1)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, 2)
        self.script = list(script)

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return loss * 0 + self.script.pop(0) if self.script and not self.training else loss


class WithoutTrainMetrics(Model):
    """A model without training metrics, which would include a batch before the optimizer steps."""

    def metrics(self, train: bool) -> Mapping[str, Any]:
        return {} if train else super().metrics(train)


class SendSignal(Callback):
    """Sends a signal to this process at BATCH_START after `batch` trained batches."""

    def __init__(self, batch: int, number: int):
        self.batch, self.number = batch, number

    def batch_start(self, state, logger):
        if state.timestamp.batch == self.batch:
            os.kill(os.getpid(), self.number)


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
    """Return the names of the run's checkpoints, after asserting that all are complete."""
    folder = run_dir / "checkpoints"
    names = {path.name for path in folder.iterdir() if not path.is_symlink()}
    assert all(is_complete(folder / name) for name in names)
    return names


def target(run_dir: Path, link: str) -> str:
    """Return the name of the checkpoint to which `latest` or `best` points."""
    return os.readlink(run_dir / "checkpoints" / link)


def assert_equal_weights(trainer: Trainer, expected: Trainer) -> None:
    """Assert that two runs have the same weights, bit for bit."""
    weights = [dict(run.state.unwrapped_model.state_dict()) for run in (trainer, expected)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
