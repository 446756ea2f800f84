"""Runs with every kind of randomness: augmentation, sample order, dropout and algorithms. Returns all their numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn

from runner import ClassificationModel, Trainer
from runner.algorithms import EMA, BatchAugment, MixUp
from runner.callbacks import InMemoryLogger
from runner.data import DatasetLoader, TensorLoader
from runner.optim.schedulers import cosine_annealing


class Model(ClassificationModel):
    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(
                nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)), 3
            )


class Noisy(torch.utils.data.Dataset):
    """Adds noise from the three global generators: those of torch, Python and numpy."""

    def __len__(self):
        return 38

    def __getitem__(self, index):
        noise = torch.randn(1, 4, 4) + random.random() + float(numpy.random.rand())
        return index + noise, index % 3


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(38, 1, 4, 4, generator=torch.Generator().manual_seed(3)), torch.arange(38) % 3


LOADERS: dict[str, Any] = {
    "tensors": lambda: TensorLoader(*make_data(), batch_size=8, shuffle=True),
    "transform": lambda: TensorLoader(
        *make_data(), batch_size=8, shuffle=True, transform=lambda batch: (batch[0] + torch.randn(1), batch[1])
    ),
    "dataset": lambda: DatasetLoader(Noisy(), batch_size=8, shuffle=True),
    "torch": lambda: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*make_data()), batch_size=8, shuffle=True
    ),
}


def run(loader: str = "tensors", **arguments: Any) -> dict[str, Any]:
    """Train, and return the final weights and all logged values; the arguments replace those of the Trainer."""
    memory = InMemoryLogger()
    with Trainer(
        **{
            "model": Model(),
            "train_dataloader": LOADERS[loader](),
            "eval_dataloader": TensorLoader(*make_data(), batch_size=8, shuffle=False),
            "optimizers": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            "schedulers": cosine_annealing(),
            "algorithms": [MixUp(), EMA("5ba"), BatchAugment(flip="random")],
            "max_duration": "2ep",
            "loggers": [memory],
            "device": "cpu",
            **arguments,
        }
    ) as trainer:
        trainer.fit()
    values = {key: [(int(now.batch), value) for now, value in points] for key, points in memory.data.items()}
    weights = {name: value.clone() for name, value in trainer.state.unwrapped_model.state_dict().items()}
    return {"weights": weights, "logged": values}


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two results of `run` are bit-identical."""
    has_same_weights = all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    return has_same_weights and first["logged"] == second["logged"]
