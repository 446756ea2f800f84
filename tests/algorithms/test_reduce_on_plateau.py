"""ReduceOnPlateau against torch's ReduceLROnPlateau, in every unit, with a warm-up, on resume and on two ranks."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner import Callback, Model, Trainer, get_global_rank
from runner.algorithms import ReduceOnPlateau
from runner.algorithms.reduce_on_plateau import is_better
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader
from runner.optim.schedulers import linear

PER_EPOCH = 2
FLAT = [1.0] * 100


class Scripted(Model):
    """Has a prescribed evaluation loss after each trained batch, on any number of ranks."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.losses = losses
        self.trained = 0

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.mean() if self.training else outputs.mean() * 0 + self.losses[self.trained]


class Rates(Callback):
    """Stores the learning rate of each batch, and counts batches for `Scripted`."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def after_train_batch(self, state: Any, logger: Any) -> None:
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])

    def batch_end(self, state: Any, logger: Any) -> None:
        state.unwrapped_model.trained = state.timestamp.batch


def fit(losses: list[float], plateau: Any, epochs: int, **arguments: Any) -> list[float]:
    """Train with a sequence of evaluation losses, and return the learning rate of each batch."""
    rates = Rates()
    data = torch.zeros(4, 2), torch.zeros(4)
    defaults: dict[str, Any] = {
        "model": Scripted(losses),
        "train_dataloader": TensorLoader(*data, batch_size=2, shuffle=False),
        "eval_dataloader": TensorLoader(*data, batch_size=2, shuffle=False),
        "optimizers": partial(SGD, lr=1.0),
        "schedulers": plateau,
        "max_duration": f"{epochs}ep",
        "device": "cpu",
    }
    defaults |= arguments
    defaults["callbacks"] = [rates, *arguments.get("callbacks", [])]
    with Trainer(**defaults) as trainer:
        trainer.fit()
    return rates.seen


def rates_of_torch(losses: list[float], epochs: int, lr: float = 1.0, **arguments: Any) -> list[float]:
    """Return the learning rate of each batch with torch's scheduler, which steps after each epoch."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = ReduceLROnPlateau(optimizer, **arguments)
    rates = []
    for epoch in range(epochs):
        rates += [optimizer.param_groups[0]["lr"]] * PER_EPOCH
        scheduler.step(losses[(epoch + 1) * PER_EPOCH])
    return rates


@pytest.mark.parametrize("seed", range(8))
def test_rates_equal_those_of_torch(seed: int):
    draw = random.Random(seed)
    epochs = 30
    values = [1.0, 0.9, 0.5, 0.89, 0.8999, math.nan, math.inf]
    losses = [draw.choice(values) for _ in range(epochs * PER_EPOCH + 1)]
    patience, cooldown = draw.randrange(3), draw.randrange(3)
    mode = draw.choice(["min", "max"])
    threshold = draw.choice([1e-4, 0.2])
    shared: dict[str, Any] = {
        "mode": mode,
        "factor": 0.5,
        "threshold": threshold,
        "threshold_mode": ["rel", "abs"][seed % 2],
    }
    minimum = draw.choice([0.0, 0.01])
    lr = [1.0, 1e-3, 1e-7, 1e-8][seed // 2]  # eps stops reductions of 1e-7, and allows none of 1e-8
    expected = rates_of_torch(losses, epochs, lr, **shared, patience=patience, cooldown=cooldown, min_lr=minimum * lr)
    plateau = ReduceOnPlateau(**shared, patience=f"{patience}ep", cooldown=f"{cooldown}ep", minimum=minimum)
    assert fit(losses, plateau, epochs, optimizers=partial(SGD, lr=lr)) == pytest.approx(expected, abs=0)
    assert (len({*expected}) > 2) == (lr > 1e-8)


@pytest.mark.parametrize("stop", [12, 2])
def test_a_small_rate_stays_while_others_fall(stop: int, tmp_path: Path):
    def two_groups(parameters: Any) -> SGD:
        weight, bias = parameters
        return SGD([{"params": [weight], "lr": 1e-8}, {"params": [bias]}], lr=1.0)

    class GroupRates(Rates):
        def after_train_batch(self, state: Any, logger: Any) -> None:
            self.seen.append([group["lr"] for group in state.optimizers[0].param_groups])

    rates = GroupRates()

    def fit_until(epochs: int, **arguments: Any) -> None:
        hooks = [rates, CheckpointSaver()]
        plateau = ReduceOnPlateau(patience="0ep")
        fit(FLAT, plateau, epochs, optimizers=two_groups, callbacks=hooks, run_dir=tmp_path, **arguments)

    fit_until(stop)
    if stop < 12:
        fit_until(12, resume_path=tmp_path)
    falling = rates_of_torch(FLAT, 12, patience=0)
    assert [rate for rate, _ in rates.seen] == [1e-8] * 24
    assert [rate for _, rate in rates.seen] == pytest.approx(falling, abs=0) and falling[-1] == pytest.approx(1e-8)


def test_infinite_and_negative_values_improve_only_by_the_threshold():
    assert not is_better(math.inf, math.inf, lower=True, threshold=0.1, relative=True)
    assert not is_better(-math.inf, -math.inf, lower=False, threshold=0.1, relative=False)
    assert is_better(5.0, math.inf, lower=True, threshold=1.0, relative=True)
    assert not is_better(-0.95, -1.0, lower=True, threshold=0.1, relative=True)
    assert is_better(-1.11, -1.0, lower=True, threshold=0.1, relative=True)
    assert is_better(-0.89, -1.0, lower=False, threshold=0.1, relative=True)


@pytest.mark.parametrize("patience", ["1ep", "2ba", "4sp", "0.25dur"])
def test_the_patience_may_be_in_any_unit(patience: str):
    assert fit(FLAT, ReduceOnPlateau(patience=patience), 4) == pytest.approx([1] * 6 + [0.1] * 2)


def test_evaluations_within_an_epoch_count_as_fractions_of_it():
    rates = fit(FLAT, ReduceOnPlateau(patience="1ep"), 3, eval_interval="1ba")
    assert rates == pytest.approx([1] * 4 + [0.1] * 2)  # best at batch 1; an epoch has passed at batch 3; reduced at 4


def test_the_multiplier_applies_to_a_warm_up_and_to_each_group():
    rates = fit(FLAT, None, 4, schedulers=linear(t_warmup="4ba", alpha_f=1), algorithms=ReduceOnPlateau(patience="1ep"))
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 0.1, 0.1])


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_resumed_run_continues_to_count_its_patience(stop: int, tmp_path: Path):
    whole = fit(FLAT, ReduceOnPlateau(patience="1ep"), 6)
    saver = CheckpointSaver(save_interval="1ba")
    first = fit(FLAT, ReduceOnPlateau(patience="1ep"), 3, max_duration=f"{stop}ba", run_dir=tmp_path, callbacks=[saver])
    resumed = fit(FLAT, ReduceOnPlateau(patience="1ep"), 6, resume_path=tmp_path)
    assert [*first, *resumed] == whole and len({*whole}) == 3


def fit_example() -> list[float]:
    losses = [1.0, 1.0, 0.9, 0.9, 0.95, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]
    return fit(losses, ReduceOnPlateau(patience="1ep"), 6)


def fit_on_a_rank() -> None:
    Path(f"rates{get_global_rank()}.json").write_text(json.dumps(fit_example()))


def test_the_state_does_not_depend_on_the_clock():
    states = []
    for _ in range(2):
        plateau = ReduceOnPlateau(patience="1ep", cooldown="1ep")
        fit([1.0] * 11, plateau, epochs=5)
        states.append(plateau.state_dict())
    assert states[0]["reduced_at"] is not None
    assert states[0] == states[1]


@pytest.mark.slow
def test_two_ranks_reduce_together(run_ranks: Any, tmp_path: Path):
    run_ranks(program_of("algorithms/test_reduce_on_plateau", "fit_on_a_rank"), 2)
    expected = fit_example()
    assert len({*expected}) > 1
    assert [json.loads((tmp_path / f"rates{rank}.json").read_text()) for rank in (0, 1)] == [expected, expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "lt"}, "mode='lt': must be one of None, 'min', 'max'"),
        ({"factor": 1.0}, "factor=1.0: must be a number above 0 and below 1"),
        ({"patience": "1h"}, "patience='3600sec': must be in ep, ba, sp, tok or dur"),
        ({"cooldown": "soon"}, "cooldown='soon' is not a time"),
        ({"threshold": -1}, "threshold=-1: must be"),
        ({"threshold_mode": "relative"}, "threshold_mode='relative': must be one of 'rel', 'abs'"),
        ({"eps": -1e-8}, "eps=-1e-08: must be a finite number, at least 0"),
        ({"minimum": 2}, "minimum=2: must be a multiplier from 0 to 1"),
        ({"monitor": "los"}, "monitor='los' is not a metric of this run; there are 'eval/loss'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        fit(FLAT, ReduceOnPlateau(**arguments), 1)


def test_schedulers_of_torch_are_refused():
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    with pytest.raises(ValueError, match="scheduler: torch's own schedulers would overwrite the learning rate"):
        fit(FLAT, [ReduceOnPlateau(), step], 1)
