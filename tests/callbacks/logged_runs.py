"""A tiny deterministic run, for tests of logger destinations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import ClassificationModel, Trainer


def make_trainer(run_dir: Path, *loggers: Any, duration: str = "2ep", **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, 2, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
    torch.manual_seed(0)
    return Trainer(
        model=ClassificationModel(nn.Linear(2, 2), num_classes=2),
        train_dataloader=samples,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_duration=duration,
        loggers=loggers,
        device="cpu",
        run_dir=run_dir,
        **arguments,
    )
