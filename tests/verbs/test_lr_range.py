"""`runner lr-range`: what it suggests where the answer is known, what it says, and that only the picture is left."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import Trainer
from runner.cli.command import Command
from runner.data import TensorLoader
from runner.failures.errors import WrongKey
from runner.models.supervised import SupervisedModel
from runner.trials.rising_rate import RisingRate, find_steepest
from runner.verbs.lr_range import check

CONFIG: dict[str, Any] = {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}
SHORT = ("lr-range", "model=mlp", "--batches=40")


def test_the_steepest_descent_before_the_minimum():
    rates = [10.0**power for power in range(-5, 4)]
    assert find_steepest(rates, [2.0, 2.0, 1.9, 1.5, 1.4, 1.3, 9.0, 8.0, 1.35]) == rates[2]  # no later fall
    assert find_steepest(rates, [2.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) is None  # too near the start to tell
    assert find_steepest(rates, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) is None
    assert find_steepest([0.1], [1.0]) is None


def rise(rising: RisingRate, **groups: float) -> list[float]:
    """Fit 2 w + b to noise around 6, and return the final rates of the parameter groups."""
    torch.manual_seed(0)
    network = nn.Linear(1, 1, bias=True)
    data = torch.full((64, 1), 2.0), 6.0 + torch.randn(64, 1)
    with Trainer(
        model=SupervisedModel(network, loss_fn=nn.functional.mse_loss),
        train_dataloader=TensorLoader(*data, batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(
            [{"params": [one], "lr": lr} for one, lr in zip(params, groups.values(), strict=True)]
        ),
        schedulers=rising.multiplier,
        max_duration="100ba",
        callbacks=[rising],
        device="cpu",
    ) as trainer:
        trainer.fit()
    return [group["lr"] for one in trainer.state.optimizers for group in one.param_groups]


def test_on_a_parabola_the_rate_is_below_the_one_at_which_descent_diverges():
    """The loss (2 w + b - y)^2 has the curvature 10, so gradient descent diverges above the rate 2 / 10."""
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


@pytest.mark.parametrize(
    ("options", "optimizer", "message"),
    [
        ({"start": 0.0}, {}, "--start=0.0: must be a learning rate above 0"),
        ({"start": math.nan}, {}, "--start=nan: must be a learning rate above 0"),
        ({"end": math.inf}, {}, "--end=inf: must be a learning rate above 0"),
        ({"end": 1e-6}, {}, "--end=1e-06: must be larger than --start 1e-05"),
        ({"batches": 19}, {}, "--batches=19: too few to see a slope; give at least 20"),
        ({"picture": "x.jpg"}, {}, "--picture='x.jpg': must end in .png"),
        ({}, None, "optimizer: lr-range varies the rate of one optimizer"),
        ({}, {"generator": {}, "critic": {}}, "of one optimizer, not generator, critic"),
        ({}, {"_target_": "mine"}, "optimizer.lr=None: lr-range varies it"),
        ({}, {"_target_": "mine", "lr": 0.0}, "optimizer.lr=0.0: "),
    ],
)
def test_what_cannot_be_tested_is_one_message(options: dict[str, Any], optimizer: dict[str, Any] | None, message: str):
    check(Command.of("lr-range"), CONFIG)
    with pytest.raises(WrongKey, match=re.escape(message)):
        check(Command.of("lr-range", **options), CONFIG if optimizer == {} else {"optimizer": optimizer})


def test_only_the_picture_is_left(tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    out = run_here(*SHORT, "--picture=pictures/mine.png", code=0).out
    assert re.search(r"^ok suggestion +optimizer\.lr=0\.\d+$", out, re.MULTILINE)
    assert (tmp_path / "pictures" / "mine.png").read_bytes().startswith(b"\x89PNG")
    refused = run_here(*SHORT, "--start=500", "--end", "1000", code=2)
    assert re.search(r"error: --start=500: the loss diverged after \d+ batches, at .*give a smaller", refused.err)
    assert {*os.listdir(tmp_path)} - {"temporary", "pictures"} == set()
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.slow
def test_two_ranks_find_what_one_does(tmp_path: Path, run_app: Any):
    runs = [run_app(*SHORT, f"launch.nproc_per_node={ranks}", f"--picture={ranks}.png") for ranks in (1, 2)]
    rates = [float(re.findall(r"optimizer\.lr=([\d.e-]+)", one.stdout)[0]) for one in runs]
    assert rates[1] == pytest.approx(rates[0], rel=0.3) and (tmp_path / "2.png").exists()
