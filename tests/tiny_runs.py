"""Runs of a linear layer on twenty equal samples, for tests in which only the course of a run matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer
from runner.data import TensorLoader


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    data = TensorLoader(torch.ones(20, 3), torch.zeros(20, dtype=torch.long), batch_size=2, shuffle=False)
    defaults: dict[str, Any] = {
        "model": ClassificationModel(nn.Linear(3, 2), 2),
        "train_dataloader": data,
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "max_duration": "1ep",
        "callbacks": list(callbacks),
        "device": "cpu",
        "run_dir": run_dir,
    }
    return Trainer(**(defaults | arguments))
