"""REINFORCE on a contextual bandit: the model produces the data. Compared with a hand-written loop, and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from runner import Model, Trainer
from runner.callbacks import CheckpointSaver

STEPS, SAMPLES, STATES, ACTIONS = 5, 16, 4, 3

Rollout = tuple[Tensor, Tensor, Tensor]


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(STATES, 8), nn.Tanh(), nn.Linear(8, ACTIONS))


def act(network: nn.Module, epoch: int, step: int) -> Rollout:
    """Return states, sampled actions, and rewards; random numbers depend only on epoch and step."""
    generator = torch.Generator().manual_seed(1000 * epoch + step)
    states = torch.randn(SAMPLES, STATES, generator=generator)
    with torch.no_grad():
        actions = network(states).softmax(1).multinomial(1, generator=generator).squeeze(1)
    return states, actions, (actions == states[:, :ACTIONS].argmax(1)).float()


def policy_gradient(logits: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    log_probabilities = logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
    return -(log_probabilities * (rewards - 1 / ACTIONS)).mean()


class Rollouts:
    """Yields rollouts of the current weights, each made when its batch is needed."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Rollout]:
        for step in range(STEPS):
            yield act(self.network, self.epoch, step)


class Policy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.module = make_network()

    def forward(self, batch):
        return self.module(batch[0])

    def loss(self, outputs, batch):
        return policy_gradient(outputs, *batch[1:])


def fit(duration: str, **arguments) -> dict[str, Tensor]:
    model = Policy()
    with Trainer(
        model=model,
        train_dataloader=Rollouts(model.module),
        optimizers=lambda parameters: Adam(parameters, lr=0.05),
        max_duration=duration,
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def fit_by_hand(epochs: int) -> tuple[dict[str, Tensor], list[float]]:
    network, mean_rewards = make_network(), []
    optimizer = Adam(network.parameters(), lr=0.05)
    for epoch in range(epochs):
        for step in range(STEPS):
            states, actions, rewards = act(network, epoch, step)
            optimizer.zero_grad()
            policy_gradient(network(states), actions, rewards).backward()
            optimizer.step()
            mean_rewards.append(float(rewards.mean()))
    return dict(network.state_dict()), mean_rewards


def test_each_rollout_uses_the_weights_of_the_previous_step_as_in_a_hand_written_loop():
    trained, (expected, mean_rewards) = fit("8ep"), fit_by_hand(8)
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    assert sum(mean_rewards[-10:]) > sum(mean_rewards[:10]) + 1  # the policy improves


@pytest.mark.parametrize("stop", ["1ep", "8ba"])
def test_on_policy_training_resumes_bit_for_bit(stop: str, tmp_path: Path):
    fit(stop, run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba")])
    resumed, whole = fit("3ep", resume_path=tmp_path), fit("3ep")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
