"""A momentum encoder with a queue of keys (MoCo, arXiv:1911.05722) trains like a hand-written loop, and resumes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD

from runner import Model, Trainer
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader

BATCH_SIZE, WIDTH, QUEUE_LENGTH = 4, 3, 8
MOMENTUM, TEMPERATURE = 0.9, 0.2


def make_data() -> tuple[Tensor, Tensor]:
    """Return two views of each sample."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(16, 5, generator=generator)
    return samples, samples + 0.1 * torch.randn(16, 5, generator=generator)


def make_parts() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, WIDTH))
    return encoder, deepcopy(encoder).requires_grad_(False), normalize(torch.randn(QUEUE_LENGTH, WIDTH), dim=1)


def contrastive_loss(queries: Tensor, keys: Tensor, queue: Tensor) -> Tensor:
    positive = (queries * keys).sum(dim=1, keepdim=True)
    logits = torch.cat([positive, queries @ queue.T], dim=1) / TEMPERATURE
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


class MomentumEncoder(Model):
    """Updates the key encoder and the queue in `forward`; both are saved with the weights."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.key_encoder, queue = make_parts()
        self.register_buffer("queue", queue)

    def forward(self, batch):
        query_view, key_view = batch
        with torch.no_grad():
            for slow, fast in zip(self.key_encoder.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 1 - MOMENTUM)
            keys = normalize(self.key_encoder(key_view), dim=1)
        queue = self.queue
        self.queue = torch.cat([queue, keys])[-QUEUE_LENGTH:]
        return normalize(self.encoder(query_view), dim=1), keys, queue

    def loss(self, outputs, batch):
        return contrastive_loss(*outputs)


def fit(duration: str, **arguments) -> dict[str, Tensor]:
    model = MomentumEncoder()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*make_data(), batch_size=BATCH_SIZE, shuffle=False),
        optimizers=lambda parameters: SGD(parameters, lr=0.5),
        max_duration=duration,
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fit_by_hand(epochs: int) -> dict[str, Tensor]:
    encoder, key_encoder, queue = make_parts()
    optimizer = SGD(encoder.parameters(), lr=0.5)
    for _ in range(epochs):
        for query_view, key_view in zip(*(views.split(BATCH_SIZE) for views in make_data()), strict=True):
            with torch.no_grad():
                for slow, fast in zip(key_encoder.parameters(), encoder.parameters(), strict=True):
                    slow.lerp_(fast, 1 - MOMENTUM)
                keys = normalize(key_encoder(key_view), dim=1)
            optimizer.zero_grad()
            contrastive_loss(normalize(encoder(query_view), dim=1), keys, queue).backward()
            optimizer.step()
            queue = torch.cat([queue, keys])[-QUEUE_LENGTH:]
    parts = {"encoder": encoder, "key_encoder": key_encoder}
    weights = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    return weights | {"queue": queue}


def test_a_momentum_encoder_with_a_queue_trains_like_a_hand_written_loop():
    trained, expected = fit("3ep"), fit_by_hand(3)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    assert not torch.equal(trained["encoder.0.weight"], trained["key_encoder.0.weight"])


@pytest.mark.parametrize("stop", ["1ep", "6ba"])
def test_a_momentum_encoder_with_a_queue_resumes_bit_for_bit(stop: str, tmp_path: Path):
    fit(stop, run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba")])
    resumed, uninterrupted = fit("3ep", resume_path=tmp_path), fit("3ep")
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
