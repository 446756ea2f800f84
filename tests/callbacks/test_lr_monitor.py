from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from runner import Callback, Model, Trainer
from runner.callbacks import InMemoryLogger, LRMonitor
from runner.data import TensorLoader
from runner.optim.schedulers import linear


class Slope(Model):
    """A model whose loss has gradient 1 for each weight, so that plain SGD moves weights by the learning rate."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.b = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def forward(self, batch):
        return self.a.weight.sum() + self.b.weight.sum()

    def loss(self, outputs, batch):
        return outputs


class Weights(Callback):
    """Records the weights before training and after each batch."""

    def __init__(self):
        self.values = []

    def fit_start(self, state, logger):
        self.batch_end(state, logger)

    def batch_end(self, state, logger):
        self.values.append([parameter.item() for parameter in state.unwrapped_model.parameters()])


def fit(**arguments: Any) -> tuple[InMemoryLogger, Weights]:
    memory, weights = InMemoryLogger(), Weights()
    defaults: dict[str, Any] = {
        "model": Slope(),
        "train_dataloader": TensorLoader(torch.ones(6), batch_size=1, shuffle=False),
        "max_duration": "6ba",
        "callbacks": [LRMonitor(), weights],
        "loggers": [memory],
        "device": "cpu",
    }
    with Trainer(**(defaults | arguments)) as trainer:
        trainer.fit()
    return memory, weights


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["float", "tensor"])
def test_the_logged_rate_is_the_one_that_moved_the_weights(rate):
    memory, weights = fit(optimizers=lambda params: torch.optim.SGD(params, lr=rate), schedulers=linear(t_warmup="3ba"))
    logged = memory.data["lr-SGD/group0"]
    moved = [before[0] - after[0] for before, after in pairwise(weights.values)]
    assert [timestamp.batch for timestamp, _ in logged] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in logged] == pytest.approx(moved)
    assert len({round(value, 9) for value in moved}) > 3


def test_each_parameter_group_has_a_key():
    def make(params):
        first, second = params
        return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.25}], lr=0.5)

    memory, weights = fit(optimizers=make)
    for group, rate in enumerate((0.5, 0.25)):
        assert [value for _, value in memory.data[f"lr-SGD/group{group}"]] == [rate] * 6
        assert weights.values[0][group] - weights.values[1][group] == pytest.approx(rate)


def test_a_second_optimizer_of_the_same_class_is_numbered():
    class OwnStep(Slope):
        loss = Model.loss

        def training_step(self, state):
            loss = self(state.microbatch)
            loss.backward()
            return loss.detach()

    def factory(rate):
        return lambda params: torch.optim.AdamW(params, lr=rate)

    memory, _ = fit(model=OwnStep(), optimizers={"a": factory(0.1), "b": factory(0.2)})
    assert [value for _, value in memory.data["lr-AdamW/group0"]] == [0.1] * 6
    assert [value for _, value in memory.data["lr-AdamW-2/group0"]] == [0.2] * 6
