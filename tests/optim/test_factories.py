from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from runner import Algorithm, Callback, ClassificationModel, Model, Trainer
from runner.data import TensorLoader
from runner.optim.factories import existing_optimizers, make_optimizers, make_schedulers
from runner.optim.scheduled_rates import ScheduledRates
from runner.optim.schedulers import constant, linear
from runner.timing.time import Progress, Time, Timestamp


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def parameters(*modules: nn.Module) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def progress(epochs: int = 2) -> Progress:
    return Progress(Timestamp(), Time.parse(f"{epochs}ep"), 5)


def test_a_factory_gets_all_parameters_that_can_ever_be_trained():
    model = Two()
    model.quantized = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    for factory in (partial(SGD, lr=0.1), lambda params: SGD(params, lr=0.1)):
        (optimizer,) = make_optimizers(factory, model)
        assert ids(optimizer) == parameters(model.body, model.head, model.frozen)


def test_instances_and_lists_are_taken_as_they_are():
    model = Two()
    one, two = SGD(model.body.parameters(), lr=0.1), Adam(model.head.parameters())
    assert make_optimizers(one, model) == [one]
    assert make_optimizers([one, two], model) == [one, two]
    assert make_optimizers(None, model) == []


def test_a_dict_may_hold_optimizers_and_names_inside_submodules():
    model = ClassificationModel(Two(), 2)
    head = SGD(model.module.head.parameters(), lr=0.1)  # type: ignore[union-attr]
    given = {"module.head": head, "module.body": partial(Adam, lr=0.1)}
    assert existing_optimizers(given) == [head]
    assert [type(one) for one in make_optimizers(given, model)] == [SGD, Adam]


def test_a_factory_of_the_model_gets_the_model():
    def configure(model: nn.Module, lr: float) -> Optimizer:
        return SGD(model.get_submodule("head").parameters(), lr=lr)

    model = Two()
    (optimizer,) = make_optimizers(partial(configure, lr=0.1), model)
    assert ids(optimizer) == parameters(model.head)


def test_a_dict_names_submodules_in_order():
    model = Two()
    made = make_optimizers({"head": partial(Adam, lr=0.1), "body": partial(SGD, lr=0.2)}, model)
    assert [type(one) for one in made] == [Adam, SGD]
    assert [ids(one) for one in made] == [parameters(model.head), parameters(model.body)]


@pytest.mark.parametrize(
    ("optimizers", "error", "message"),
    [
        (3, TypeError, "optimizers=3: must be an optimizer, or a factory"),
        ([partial(SGD, lr=0.1), "adam"], TypeError, "optimizers='adam': must be"),
        (lambda params: list(params), TypeError, "optimizers: the factory returned a list"),
        ({"tail": partial(SGD, lr=0.1)}, ValueError, "optimizers='tail': the keys must name submodules of the model"),
        ({"frozen": partial(SGD, lr=0.1)}, ValueError, "optimizers['frozen']: the model has no trainable parameter"),
    ],
)
def test_what_is_no_optimizer_is_named(optimizers: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        make_optimizers(optimizers, Two())


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="optimizers=SGD: 2 of its parameters are not in the model"):
        make_optimizers(SGD(nn.Linear(3, 4).parameters(), lr=0.1), Two())


def test_weights_that_submodules_share_are_stepped_once():
    tied = Two()
    tied.head.weight = tied.body.weight
    with pytest.raises(ValueError, match="1 parameters are in several"):
        make_optimizers({"body": partial(SGD, lr=0.1), "head": partial(SGD, lr=0.1)}, tied)
    with pytest.raises(ValueError, match="4 parameters are in several"):
        make_optimizers([partial(SGD, lr=0.1), partial(SGD, lr=0.1)], Two())


def test_surgery_at_init_needs_a_factory():
    class Replace(Algorithm):
        def init(self, state, logger):
            state.unwrapped_model.module = nn.Linear(3, 2)

    def make(optimizers: Any, model: Model) -> Trainer:
        return Trainer(model=model, optimizers=optimizers, algorithms=[Replace()], device="cpu")

    model = ClassificationModel(nn.Linear(3, 2), 2)
    with make(partial(SGD, lr=0.1), model) as trainer:
        assert ids(trainer.state.optimizers[0]) == parameters(model.module)
    model = ClassificationModel(nn.Linear(3, 2), 2)
    with pytest.raises(ValueError, match="Give a factory"):
        make(SGD(model.parameters(), lr=0.1), model)


def test_schedules_are_bound_to_each_optimizer():
    model = Two()
    optimizers = make_optimizers({"head": partial(Adam, lr=0.1), "body": partial(SGD, lr=0.2)}, model)
    rates, stepped = make_schedulers([linear(), constant(0.5)], optimizers, progress(), 1.0, False)
    assert all(isinstance(one, ScheduledRates) for one in rates) and not stepped
    for one in rates:
        one.step(Progress(Timestamp()._replace(epoch=1), Time.parse("2ep"), 5))
    assert [one.param_groups[0]["lr"] for one in optimizers] == pytest.approx([0.025, 0.05])


def test_torch_schedulers_are_made_for_each_optimizer():
    optimizers = make_optimizers({"body": partial(SGD, lr=1.0), "head": partial(Adam, lr=1.0)}, Two())
    given = [partial(StepLR, step_size=1), lambda optimizer: ExponentialLR(optimizer, 0.9)]
    rates, stepped = make_schedulers(given, optimizers, progress(), 1.0, False)
    assert not rates and [type(one) for one in stepped] == [StepLR, StepLR, ExponentialLR, ExponentialLR]
    assert [one.optimizer for one in stepped] == optimizers * 2


def test_a_torch_scheduler_may_be_given_built():
    model = Two()
    optimizer = SGD(model.body.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1)
    _, stepped = make_schedulers(scheduler, make_optimizers(optimizer, model), progress(), 1.0, False)
    assert stepped == [scheduler]
    with pytest.raises(ValueError, match="schedulers=StepLR: its optimizer is not one of this run"):
        make_schedulers(scheduler, make_optimizers(partial(SGD, lr=1.0), model), progress(), 1.0, False)


def test_a_function_of_the_timestamp_is_a_schedule():
    def halved(timestamp: Timestamp) -> float:
        return 0.5**timestamp.epoch

    assert rates_of(schedulers=halved) == [1, 1, 1, 0.5, 0.5, 0.5]
    assert rates_of(schedulers=[halved, linear(t_max="6ba")])[3:] == pytest.approx([1 / 4, 1 / 6, 1 / 12])
    for value in (-1, float("nan"), "x", None):
        with pytest.raises(ValueError, match=f"returned {value!r} at batch 0; must be a finite number"):
            rates_of(schedulers=lambda timestamp, value=value: value)


def test_both_kinds_of_schedules_at_once_are_refused():
    with pytest.raises(ValueError, match="would undo each other"):
        make_schedulers(
            [constant(0.5), partial(StepLR, step_size=1)],
            make_optimizers(partial(SGD, lr=1.0), Two()),
            progress(),
            1.0,
            False,
        )


@pytest.mark.parametrize(
    ("schedulers", "message"),
    [
        ("cosine", "schedulers='cosine': must be a schedule"),
        (lambda optimizer: "x", "returned a str, which has no step()"),
        (lambda t: 0.5, "returned 0.5: name its first argument `timestamp`"),
        (
            partial(ReduceLROnPlateau),
            "schedulers=ReduceLROnPlateau: torch's class cannot see a run's metrics; use runner.algorithms.Reduce",
        ),
    ],
)
def test_what_is_no_scheduler_is_named(schedulers: Any, message: str):
    with pytest.raises(TypeError, match=re.escape(message)):
        make_schedulers(schedulers, make_optimizers(partial(SGD, lr=1.0), Two()), progress(), 1.0, False)


def test_a_schedule_that_does_not_fit_is_refused_before_training():
    with pytest.raises(ValueError, match="t_warmup"):
        make_schedulers(linear(t_warmup="3ep"), make_optimizers(partial(SGD, lr=1.0), Two()), progress(2), 1.0, False)


class Rates(Callback):
    """The rate of each step, as it was used."""

    def __init__(self):
        self.seen: list[float] = []

    def after_train_batch(self, state, logger):
        self.seen.append(float(state.optimizers[0].param_groups[0]["lr"]))


def rates_of(**arguments: Any) -> list[float]:
    rates = Rates()
    with Trainer(
        model=ClassificationModel(nn.Linear(3, 2), 2),
        train_dataloader=TensorLoader(torch.randn(6, 3), torch.arange(6) % 2, batch_size=2, shuffle=True),
        optimizers=partial(SGD, lr=1.0),
        max_duration="2ep",
        callbacks=[rates],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return rates.seen


def test_torch_schedulers_step_per_epoch_or_batch():
    halve = partial(ExponentialLR, gamma=0.5)
    assert rates_of(schedulers=halve) == [1, 1, 1, 0.5, 0.5, 0.5]
    assert rates_of(schedulers=halve, step_schedulers_every_batch=True) == [0.5**n for n in range(6)]
    assert rates_of(schedulers=[halve, halve]) == [1, 1, 1, 0.25, 0.25, 0.25]


def test_the_whole_schedule_is_scaled_with_the_run():
    halved = rates_of(schedulers=linear(t_max="6ba"), scale_schedule_ratio=0.5)
    assert halved == pytest.approx([1, 2 / 3, 1 / 3])
