"""Truncated backpropagation through time carries a hidden state across windows, as in a hand-written loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from runner import Model, Trainer
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader

SEQUENCES, WINDOW, WINDOWS, HIDDEN = 3, 5, 4, 6


def make_windows(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets `(windows * sequences, window, 1)`; a batch has the next window of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    series = torch.randn(SEQUENCES, WINDOWS * WINDOW + 1, generator=generator).cumsum(1) / 5

    def cut(part: Tensor) -> Tensor:
        return torch.cat([*part.split(WINDOW, dim=1)]).unsqueeze(-1)

    return cut(series[:, :-1]), cut(series[:, 1:])


def make_parts() -> tuple[nn.GRU, nn.Linear]:
    torch.manual_seed(1)
    return nn.GRU(1, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)


class Recurrent(Model):
    """Carries the hidden state in a buffer, which checkpoints save; evaluation starts from zeros."""

    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = make_parts()
        self.register_buffer("hidden", torch.zeros(1, SEQUENCES, HIDDEN))
        self.register_buffer("windows", torch.tensor(0))

    def forward(self, batch):
        if self.windows % WINDOWS == 0:  # the sequences start again
            self.hidden = torch.zeros_like(self.hidden)
        states, hidden = self.cell(batch[0], self.hidden)
        self.hidden = hidden.detach()
        self.windows = self.windows + 1
        return self.head(states)

    def loss(self, outputs, batch):
        return mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self.head(self.cell(batch[0])[0])


def fit(duration: str, **arguments) -> dict[str, Tensor]:
    model = Recurrent()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*make_windows(), batch_size=SEQUENCES, shuffle=False),
        eval_dataloader=TensorLoader(*make_windows(seed=1), batch_size=2, shuffle=False),
        eval_interval="3ba",  # also in the middle of a sequence
        optimizers=lambda parameters: SGD(parameters, lr=0.3),
        max_duration=duration,
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fit_by_hand(epochs: int) -> dict[str, Tensor]:
    cell, head = make_parts()
    optimizer = SGD([*cell.parameters(), *head.parameters()], lr=0.3)
    hidden = torch.zeros(1, SEQUENCES, HIDDEN)
    for _ in range(epochs):
        hidden = torch.zeros(1, SEQUENCES, HIDDEN)
        for inputs, targets in zip(*(part.split(SEQUENCES) for part in make_windows()), strict=True):
            optimizer.zero_grad()
            states, hidden = cell(inputs, hidden.detach())
            mse_loss(head(states), targets).backward()
            optimizer.step()
    parts = {"cell": cell, "head": head}
    weights = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
    return weights | {"hidden": hidden.detach(), "windows": torch.tensor(epochs * WINDOWS)}


def test_a_hidden_state_is_carried_from_batch_to_batch_as_in_a_hand_written_loop():
    trained, expected = fit("3ep"), fit_by_hand(3)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stop", ["1ep", "6ba"])
def test_a_hidden_state_resumes_bit_for_bit(stop: str, tmp_path: Path):
    fit(stop, run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba")])
    resumed, whole = fit("3ep", resume_path=tmp_path), fit("3ep")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
