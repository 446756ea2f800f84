"""LBFGS computes the loss several times per step: compared with a hand-written loop, resumed, refused on two ranks."""

from __future__ import annotations

import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from runner import Model, Trainer
from runner.callbacks import CheckpointSaver, InMemoryLogger
from runner.data import TensorLoader
from runner.optim.closures import TRAINING_STEP

BATCH_SIZE = 16
LBFGS: Any = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")
SCHEDULE = [0.5, 0.4, 0.3, 0.2]


def make_data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs, inputs.prod(dim=1, keepdim=True).tanh()


def make_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Plain(Model):
    def __init__(self) -> None:
        super().__init__()
        self.network = make_network()

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch):
        return mse_loss(outputs, batch[1])


# A subclass with the method that the error message recommends.
namespace: dict[str, Any] = {"Plain": Plain}
exec("class Fitted(Plain):\n" + textwrap.indent(textwrap.dedent(TRAINING_STEP), "    "), namespace)
Fitted = namespace["Fitted"]


def fit(model: Model, duration: str = "4ep", **arguments: Any) -> tuple[list[float], list[Tensor]]:
    """Return the loss of each batch, and the weights."""
    memory = InMemoryLogger()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*make_data(), batch_size=BATCH_SIZE, shuffle=False),
        optimizers=LBFGS,
        schedulers=lambda timestamp: SCHEDULE[timestamp.epoch] / SCHEDULE[0],
        max_duration=duration,
        loggers=[memory],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return memory.get_timeseries("loss/train/total")[1], [weight.detach().clone() for weight in model.parameters()]


def fit_by_hand() -> tuple[list[float], list[Tensor]]:
    network = make_network()
    optimizer = LBFGS(network.parameters())
    losses = []
    for rate in SCHEDULE:
        optimizer.param_groups[0]["lr"] = rate
        for inputs, targets in zip(*(tensor.split(BATCH_SIZE) for tensor in make_data()), strict=True):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = mse_loss(network(inputs), targets)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
    return losses, [weight.detach() for weight in network.parameters()]


def test_lbfgs_equals_a_hand_written_loop():
    losses, weights = fit(Fitted())
    expected, expected_weights = fit_by_hand()
    assert losses == pytest.approx(expected) and losses[-1] < losses[0] / 2
    assert all(map(torch.equal, weights, expected_weights))


@pytest.mark.parametrize("stop", ["1ep", "3ba"])
def test_lbfgs_resumes_bit_for_bit(stop: str, tmp_path: Path):
    losses, weights = fit(Fitted())
    first_losses, _ = fit(Fitted(), stop, run_dir=tmp_path, callbacks=[CheckpointSaver(save_interval="1ba")])
    last_losses, resumed_weights = fit(Fitted(), resume_path=tmp_path)
    assert [*first_losses, *last_losses] == losses
    assert all(map(torch.equal, weights, resumed_weights))


def fit_on_a_rank() -> None:
    fit(Fitted())


def test_lbfgs_on_two_ranks_is_refused(run_ranks: Any):
    ranks = run_ranks(program_of("shapes/test_lbfgs", "fit_on_a_rank"), check=False)
    assert all("Fitted.training_step: LBFGS.step() takes a closure only on a single" in rank.stderr for rank in ranks)


def test_the_error_without_manual_optimization_contains_the_method_to_add():
    message = "several times. Add this to a subclass of Plain, and train on one rank:" + TRAINING_STEP
    with pytest.raises(TypeError, match=re.escape(message)):
        fit(Plain())
