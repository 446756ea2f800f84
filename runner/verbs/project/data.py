"""The data of this project: a function that returns a training and an evaluation loader."""

import math

import torch

from runner.data import TensorLoader


def load_two_moons(num_samples: int = 500, batch_size: int = 50, seed: int = 0) -> tuple[TensorLoader, TensorLoader]:
    """Return a training and an evaluation loader of points `(N, 2)`, and the half circle `(N,)` that each is on.

    Args:
        num_samples: points to train on, and to evaluate on.
        batch_size: points in a batch, all ranks together.
        seed: seed of the points and of the order of the training samples.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(2 * num_samples) % 2
    angles = math.pi * (torch.rand(2 * num_samples, generator=generator) + labels)
    points = torch.stack([angles.cos() + labels, angles.sin() + labels / 2], dim=1)
    points += 0.1 * torch.randn(points.shape, generator=generator)
    train = TensorLoader(points[:num_samples], labels[:num_samples], batch_size=batch_size, shuffle=True, seed=seed)
    evaluation = TensorLoader(points[num_samples:], labels[num_samples:], batch_size=batch_size, shuffle=False)
    return train, evaluation
