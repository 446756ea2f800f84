"""A learning rate that rises until the loss diverges, and the rate suggested for a problem with a known limit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from runner import Trainer
from runner.data import TensorLoader
from runner.models.supervised import SupervisedModel
from runner.trials.rising_rate import RisingRate, find_steepest


def test_steepest_descent_is_found_before_the_minimum():
    rates = [10.0**power for power in range(-5, 4)]
    assert (
        find_steepest(rates, [2.0, 2.0, 1.9, 1.5, 1.4, 1.3, 9.0, 8.0, 1.35]) == rates[2]
    )  # not the later, steeper fall
    assert find_steepest(rates, [2.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) is None  # too near the start to tell
    assert find_steepest(rates, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) is None
    assert find_steepest([0.1], [1.0]) is None


def rise(rising: RisingRate, **rates: float) -> list[float]:
    """Fit 2 w + b to noise around 6, and return the final rates of the parameter groups."""
    torch.manual_seed(0)
    network = nn.Linear(1, 1, bias=True)
    data = torch.full((64, 1), 2.0), 6.0 + torch.randn(64, 1)
    with Trainer(
        model=SupervisedModel(network, loss_fn=nn.functional.mse_loss),
        train_dataloader=TensorLoader(*data, batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(
            [{"params": [parameter], "lr": lr} for parameter, lr in zip(params, rates.values(), strict=True)]
        ),
        schedulers=rising.multiplier,
        max_duration="100ba",
        callbacks=[rising],
        device="cpu",
    ) as trainer:
        trainer.fit()
    return [group["lr"] for optimizer in trainer.state.optimizers for group in optimizer.param_groups]


def test_suggested_rate_on_a_parabola_is_below_divergence():
    """The largest curvature of the loss (2 w + b - y)^2 is 10, so gradient descent diverges at rates above 2 / 10."""
    rising = RisingRate(1e-5, 10.0, 100, base=0.1)
    rise(rising, weight=0.1, bias=0.1)
    rate = rising.suggest()
    assert rate is not None and 0.002 < rate < 0.2 < (rising.diverged_at or 0.0) < 10.0
    assert rising.rates[0] == pytest.approx(1e-5) and rising.rates == sorted(rising.rates)
    assert all(map(math.isfinite, rising.losses))


def test_parameter_groups_keep_their_ratios():
    rising = RisingRate(1e-5, 1e-3, 100, base=0.1)
    assert rise(rising, weight=0.1, bias=0.02) == pytest.approx([1e-3, 2e-4])
    assert rising.rates[-1] == pytest.approx(1e-3) and rising.diverged_at is None
