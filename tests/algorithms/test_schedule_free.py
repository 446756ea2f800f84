from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch

from runner import Callback, ClassificationModel, evaluation_weights
from runner.algorithms import NaNGuard, ScheduleFree
from runner.algorithms.schedule_free import _StepWeights
from runner.optim import Muon
from runner.optim.schedulers import constant, linear

PLAIN_SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.05, betas=(0.0, 0.9), weight_decay=0.0)


class Steps(Callback):
    """Stores the weights, gradients and learning rate of each step of the optimizer, and the initial weights."""

    def __init__(self):
        self.seen, self.rates = [], []

    def fit_start(self, state, logger):
        self.initial = [parameter.detach().clone() for parameter in state.unwrapped_model.parameters()]

    def after_train_batch(self, state, logger):
        parameters = state.unwrapped_model.parameters()
        self.seen.append([(p.detach().clone(), p.grad.clone()) for p in parameters if p.grad is not None])
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def averaged(trainer) -> list[torch.Tensor]:
    with evaluation_weights(trainer.state):
        return [parameter.detach().clone() for parameter in trainer.state.unwrapped_model.parameters()]


def recurrence(record: Steps, beta: float, adam: bool) -> tuple[list[Any], list[Any]]:
    """Return the last x and all y by the formulas of the paper, from the stored gradients."""
    z, x = ([weight.clone() for weight in record.initial] for _ in range(2))
    square = [torch.zeros_like(weight) for weight in z]
    points, total, highest = [[*x]], 0.0, 0.0
    for t, (step, rate) in enumerate(zip(record.seen, record.rates, strict=True), start=1):
        highest = max(highest, rate)
        total += highest**2
        c = highest**2 / total if total else 0.0
        for i, (_, gradient) in enumerate(step):
            square[i] = 0.9 * square[i] + 0.1 * gradient**2
            scaled = gradient / ((square[i] / (1 - 0.9**t)).sqrt() + 1e-8) if adam else gradient
            z[i] = z[i] - rate * scaled
            x[i] = (1 - c) * x[i] + c * z[i]
        points.append([(1 - beta) * base + beta * average for base, average in zip(z, x, strict=True)])
    return x, points


@pytest.mark.parametrize("optimizer", [PLAIN_SGD, ADAMW])
@pytest.mark.parametrize(
    ("arguments", "schedulers"),
    [({}, None), ({"beta": 0.0}, None), ({"warmup": "3ba"}, None), ({}, constant(t_warmup="3ba"))],
)
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_steps_are_those_of_the_paper(make_trainer, optimizer, arguments, schedulers, grad_accum: int):
    record = Steps()
    options = {"optimizers": optimizer, "schedulers": schedulers, "callbacks": [record], "grad_accum": grad_accum}
    with make_trainer(ScheduleFree(**arguments), **options) as trainer:
        trainer.fit()
        average = averaged(trainer)
    x, points = recurrence(record, arguments.get("beta", 0.9), optimizer is ADAMW)
    torch.testing.assert_close(average, x)
    for step, expected in zip(record.seen, points, strict=False):
        torch.testing.assert_close([weights for weights, _ in step], expected)


def test_a_constant_rate_averages_all_steps_equally():
    sums, weights = _StepWeights(), []
    for _ in range(4):
        sums, weight = sums.next(0.3)
        weights.append(weight)
    assert weights == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert _StepWeights().next(0.0) == (_StepWeights(), 0.0)


def test_groups_with_different_rates_learn(make_trainer):
    optimizer = partial(Muon, lr=0.1, momentum=0.0, rest="sgd", rest_lr=0.05)
    with make_trainer(ScheduleFree(), optimizers=optimizer) as trainer:
        trainer.fit()
        loss = trainer.eval()["eval"]["loss"]
    with make_trainer() as untrained:
        assert float(loss) < float(untrained.eval()["eval"]["loss"])


def test_evaluations_of_the_average_do_not_change_training(make_trainer):
    with make_trainer(ScheduleFree(), optimizers=ADAMW, batch_norm=True) as plain:
        plain.fit()
    with make_trainer(ScheduleFree(), optimizers=ADAMW, batch_norm=True, eval_interval="1ba") as often:
        often.fit()
    weights = [dict(trainer.state.unwrapped_model.state_dict()) for trainer in (often, plain)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_closing_removes_the_hooks_of_the_optimizer(make_trainer):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with make_trainer(ScheduleFree(), model=ClassificationModel(net, 3), optimizers=optimizer) as trainer:
        trainer.fit()
    before = copy.deepcopy(net.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)


def test_unsuitable_settings_warn_or_are_refused(make_trainer, caplog):
    algorithms = [ScheduleFree(), NaNGuard("rollback")]
    with (
        make_trainer(*algorithms, optimizers=PLAIN_SGD) as trainer,
        pytest.raises(ValueError, match="policy='rollback'"),
    ):
        trainer.fit()
    with caplog.at_level(logging.WARNING, "runner"), make_trainer(ScheduleFree(), schedulers=linear()) as trainer:
        trainer.fit()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "ScheduleFree replaces momentum",
        "ScheduleFree replaces a schedule",
    ]
    caplog.clear()
    with make_trainer(ScheduleFree(), optimizers=ADAMW, schedulers=constant()) as trainer:
        trainer.fit()
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"beta": 1.0}, "beta=1.0"), ({"warmup": "slow"}, "warmup='slow'"), ({"bn_batches": True}, "bn_batches=True")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ScheduleFree(**arguments)


@pytest.mark.parametrize("stop_at", [2, 4])
@pytest.mark.parametrize("warmup", ["0ba", "5ba"])
def test_a_resumed_run_is_bit_identical(check_resume, warmup: str, stop_at: int):
    check_resume(lambda: [ScheduleFree(warmup=warmup)], stop_at, optimizers=ADAMW, batch_norm=True)
