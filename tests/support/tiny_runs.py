"""Runs of a linear layer on equal samples, for tests that do not depend on the model or the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer
from runner.data import TensorLoader


def make_data(samples: int) -> TensorLoader:
    return TensorLoader(torch.ones(samples, 3), torch.zeros(samples, dtype=torch.long), batch_size=2, shuffle=False)


def tiny_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    """Return a Trainer for epochs of four batches with two samples each; arguments replace the defaults."""
    if "model" not in arguments:
        arguments["model"] = ClassificationModel(nn.Linear(3, 2), 2)
    defaults: dict[str, Any] = {
        "train_dataloader": make_data(8),
        "optimizers": lambda params: torch.optim.SGD(params, lr=0.1),
        "callbacks": list(callbacks),
        "device": "cpu",
    }
    return Trainer(**(defaults | arguments))


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    """Return a Trainer for one epoch of ten batches, with a run folder."""
    defaults: dict[str, Any] = {"train_dataloader": make_data(20), "max_duration": "1ep", "run_dir": run_dir}
    return tiny_trainer(*callbacks, **(defaults | arguments))
