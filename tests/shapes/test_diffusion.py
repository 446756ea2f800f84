"""Diffusion with an EMA of the weights, compared with a hand-written loop, and resumed."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW

from runner import Callback, Model, Trainer
from runner.algorithms import EMA
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader

BATCH_SIZE, TIMESTEPS, DECAY = 4, 10, 0.5
SIGNAL = torch.linspace(0.99, 0.1, TIMESTEPS)  # alpha-bar; the noise has the variance 1 - SIGNAL


def make_data() -> Tensor:
    return torch.randn(16, 2, generator=torch.Generator().manual_seed(0)) + 2


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 2))


def predict_noise(network: nn.Module, samples: Tensor, timesteps: Tensor, noise: Tensor) -> Tensor:
    signal = SIGNAL[timesteps][:, None]
    noisy = signal.sqrt() * samples + (1 - signal).sqrt() * noise
    return network(torch.cat([noisy, timesteps[:, None] / TIMESTEPS], dim=1))


class Diffusion(Model):
    """Predicts the noise in samples; `forward` draws noise and timesteps from torch's default generator."""

    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()
        self.draws: list[tuple[Tensor, Tensor]] = []

    def forward(self, batch):
        timesteps, noise = torch.randint(TIMESTEPS, (len(batch[0]),)), torch.randn_like(batch[0])
        self.draws.append((timesteps, noise))
        return predict_noise(self.network, batch[0], timesteps, noise), noise

    def loss(self, outputs, batch):
        return mse_loss(*outputs)


class EvaluatedWeights(Callback):
    """Copies the weights at the start of each evaluation."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []

    def eval_start(self, state, logger):
        self.weights.append([weight.detach().clone() for weight in state.unwrapped_model.parameters()])


def fit(duration: str, *callbacks: Callback, **arguments: Any) -> Diffusion:
    model = Diffusion()
    data = make_data()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(data, data, batch_size=BATCH_SIZE, shuffle=False),
        eval_dataloader=TensorLoader(data, data, batch_size=16, shuffle=False),
        optimizers=lambda parameters: AdamW(parameters, lr=0.01),
        algorithms=EMA(smoothing=DECAY, half_life=None, update_interval="1ba"),
        callbacks=callbacks,
        max_duration=duration,
        device="cpu",
        seed=3,
        **arguments,
    ) as trainer:
        trainer.fit()
    return model


def training_draws(model: Diffusion) -> list[tuple[Tensor, Tensor]]:
    """Return the timesteps and the noise of each training batch, and leave out the larger evaluation batches."""
    return [(timesteps, noise) for timesteps, noise in model.draws if len(timesteps) == BATCH_SIZE]


def test_diffusion_trains_like_a_hand_written_loop_and_evaluates_the_ema():
    evaluated = EvaluatedWeights()
    model = fit("3ep", evaluated)
    draws = iter(training_draws(model))
    network = make_network()
    average = deepcopy(network)
    optimizer = AdamW(network.parameters(), lr=0.01)
    averages, distinct_noise = [], set()
    for _ in range(3):
        for samples in make_data().split(BATCH_SIZE):
            timesteps, noise = next(draws)
            distinct_noise.add(tuple(noise.flatten().tolist()))
            optimizer.zero_grad()
            mse_loss(predict_noise(network, samples, timesteps, noise), noise).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), network.parameters(), strict=True):
                    slow.lerp_(fast, 1 - DECAY)
        averages.append([weight.detach().clone() for weight in average.parameters()])
    assert len(distinct_noise) == 12
    assert all(map(torch.equal, model.network.parameters(), network.parameters()))
    for weights, expected in zip(evaluated.weights, averages, strict=True):
        torch.testing.assert_close(weights, expected)
    assert not torch.allclose(averages[-1][0], next(network.parameters()))


@pytest.mark.parametrize("stop", ["1ep", "6ba"])
def test_a_resumed_run_draws_the_same_noise_as_an_uninterrupted_run(stop: str, tmp_path: Path):
    uninterrupted = fit("3ep")
    first = fit(stop, CheckpointSaver(save_interval="1ba"), run_dir=tmp_path)
    resumed = fit("3ep", resume_path=tmp_path)
    expected, actual = training_draws(uninterrupted), training_draws(first) + training_draws(resumed)
    assert len(expected) == 12
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert all(map(torch.equal, resumed.parameters(), uninterrupted.parameters()))
