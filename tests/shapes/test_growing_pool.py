"""Active learning: each epoch adds the samples with the largest loss to the pool. Compared with a hand-written loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from runner import Callback, ClassificationModel, Trainer
from runner.callbacks import CheckpointSaver
from runner.optim.schedulers import cosine_annealing

EPOCHS, BATCH_SIZE, INITIAL, ADDED, RATE = 4, 4, 8, 8, 0.5


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def grow(pool: list[int], network: Callable[[Any], Tensor]) -> list[int]:
    """Return the pool with the samples added that have the largest losses outside it."""
    inputs, targets = make_data()
    with torch.no_grad():
        losses = cross_entropy(network(inputs), targets, reduction="none")
    losses[pool] = -1
    return pool + losses.topk(ADDED).indices.tolist()


class Pool(Callback):
    """A loader that is also a callback, so that checkpoints save its samples."""

    def __init__(self) -> None:
        self.samples = [*range(INITIAL)]

    def __len__(self) -> int:
        return len(self.samples) // BATCH_SIZE

    def __iter__(self):
        inputs, targets = make_data()
        for batch in torch.tensor(self.samples).split(BATCH_SIZE):
            yield inputs[batch], targets[batch]

    def epoch_end(self, state, logger):
        self.samples = grow(self.samples, lambda inputs: state.unwrapped_model((inputs, None)))

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


def fit(**arguments) -> tuple[dict[str, Tensor], list[int]]:
    """Return the weights and the samples in the pool."""
    pool = Pool()
    model = ClassificationModel(make_network(), num_classes=2)
    with Trainer(
        model=model,
        train_dataloader=pool,
        optimizers=lambda parameters: SGD(parameters, lr=RATE),
        schedulers=cosine_annealing(),
        max_duration=f"{EPOCHS}ep",
        callbacks=[pool, *arguments.pop("callbacks", [])],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}, pool.samples


def fit_by_hand() -> tuple[dict[str, Tensor], list[int]]:
    network, pool = make_network(), [*range(INITIAL)]
    optimizer = SGD(network.parameters(), lr=RATE)
    inputs, targets = make_data()
    for epoch in range(EPOCHS):
        batches = torch.tensor(pool).split(BATCH_SIZE)
        for number, batch in enumerate(batches):
            progress = (epoch + number / len(batches)) / EPOCHS
            optimizer.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * progress)) / 2
            optimizer.zero_grad()
            cross_entropy(network(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        pool = grow(pool, network)
    return dict(network.state_dict()), pool


def test_training_with_a_growing_pool_equals_a_hand_written_loop():
    (trained, pool), (expected, expected_pool) = fit(), fit_by_hand()
    assert pool == expected_pool and len({*pool}) == 40
    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batches", [1, 2, 5, 8, 12])  # epochs have 2, 4, 6 and 8 batches
def test_training_with_a_growing_pool_resumes_bit_for_bit(batches: int, tmp_path: Path):
    class Killed(BaseException):
        pass

    class Kill(Callback):
        def batch_checkpoint(self, state, logger):
            if state.timestamp.batch == batches:
                raise Killed

    with pytest.raises(Killed):
        fit(run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba"), Kill()])
    (resumed, pool), (whole, whole_pool) = fit(resume_path=tmp_path), fit()
    assert pool == whole_pool
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
