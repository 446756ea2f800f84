"""Tests of this project, for `python -m pytest`."""

import subprocess
import sys
from pathlib import Path

import torch
from data import load_two_moons
from models import TwoLayers

from runner import ClassificationModel, Trainer


def test_the_network_learns() -> None:
    """Train briefly, and classify new points."""
    train, evaluation = load_two_moons()
    network = TwoLayers()
    with Trainer(
        model=ClassificationModel(network, num_classes=2),
        train_dataloader=train,
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.03),
        max_duration="5ep",
        device="cpu",
    ) as trainer:
        trainer.fit()
    points, labels = next(iter(evaluation))
    assert (network(points).argmax(dim=1) == labels).float().mean() > 0.8


def test_the_configs_fit_the_code() -> None:
    """Try the experiment out without training."""
    command = [sys.executable, "-m", "runner", "check", "experiment=two_moons"]
    subprocess.run(command, cwd=Path(__file__).parent, check=True)
