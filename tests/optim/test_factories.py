"""Optimizers and schedulers from instances, factories, and dictionaries of submodules."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def parameters_in(optimizer: Optimizer) -> set[nn.Parameter]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def parameters_of(*modules: nn.Module) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def progress(epoch: int = 0) -> Progress:
    """Return the start of an epoch, in a training of two epochs of five batches."""
    return Progress(Timestamp(epoch=epoch), Time.parse("2ep"), 5)


def test_a_factory_gets_frozen_parameters_but_no_integer_ones():
    model = Net()
    model.quantized = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    for factory in (partial(SGD, lr=0.1), lambda params: SGD(params, lr=0.1)):
        (optimizer,) = make_optimizers(factory, model)
        assert parameters_in(optimizer) == parameters_of(model.body, model.head, model.frozen)


def test_optimizer_instances_are_used_directly():
    model = Net()
    sgd, adam = SGD(model.body.parameters(), lr=0.1), Adam(model.head.parameters())
    assert make_optimizers(sgd, model) == [sgd]
    assert make_optimizers([sgd, adam], model) == [sgd, adam]
    assert make_optimizers(None, model) == []


def test_a_dict_may_mix_optimizers_and_factories_and_use_dotted_names():
    model = ClassificationModel(Net(), 2)
    head = SGD(model.module.head.parameters(), lr=0.1)  # type: ignore[union-attr]
    optimizers = {"module.head": head, "module.body": partial(Adam, lr=0.1)}
    assert existing_optimizers(optimizers) == [head]
    assert [type(optimizer) for optimizer in make_optimizers(optimizers, model)] == [SGD, Adam]


def test_a_factory_with_an_argument_named_model_gets_the_model():
    def configure(model: nn.Module, lr: float) -> Optimizer:
        return SGD(model.get_submodule("head").parameters(), lr=lr)

    model = Net()
    (optimizer,) = make_optimizers(partial(configure, lr=0.1), model)
    assert parameters_in(optimizer) == parameters_of(model.head)


def test_optimizers_are_in_the_order_of_the_dict():
    model = Net()
    optimizers = make_optimizers({"head": partial(Adam, lr=0.1), "body": partial(SGD, lr=0.2)}, model)
    assert [type(optimizer) for optimizer in optimizers] == [Adam, SGD]
    assert [*map(parameters_in, optimizers)] == [parameters_of(model.head), parameters_of(model.body)]


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
def test_wrong_optimizers_are_named_in_the_error(optimizers: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        make_optimizers(optimizers, Net())


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="optimizers=SGD: 2 of its parameters are not in the model"):
        make_optimizers(SGD(nn.Linear(3, 4).parameters(), lr=0.1), Net())


def test_parameters_in_several_optimizers_are_refused():
    tied = Net()
    tied.head.weight = tied.body.weight
    with pytest.raises(ValueError, match="1 parameters are in several"):
        make_optimizers({"body": partial(SGD, lr=0.1), "head": partial(SGD, lr=0.1)}, tied)
    with pytest.raises(ValueError, match="4 parameters are in several"):
        make_optimizers([partial(SGD, lr=0.1), partial(SGD, lr=0.1)], Net())


def test_an_algorithm_that_replaces_layers_at_init_needs_an_optimizer_factory():
    class Replace(Algorithm):
        def init(self, state, logger):
            state.unwrapped_model.module = nn.Linear(3, 2)

    def make_trainer(optimizers: Any, model: Model) -> Trainer:
        return Trainer(model=model, optimizers=optimizers, algorithms=[Replace()], device="cpu")

    model = ClassificationModel(nn.Linear(3, 2), 2)
    with make_trainer(partial(SGD, lr=0.1), model) as trainer:
        assert parameters_in(trainer.state.optimizers[0]) == parameters_of(model.module)
    model = ClassificationModel(nn.Linear(3, 2), 2)
    with pytest.raises(ValueError, match="Give a factory"):
        make_trainer(SGD(model.parameters(), lr=0.1), model)


def test_schedules_apply_to_each_optimizer():
    model = Net()
    optimizers = make_optimizers({"head": partial(Adam, lr=0.1), "body": partial(SGD, lr=0.2)}, model)
    rates, stepped = make_schedulers([linear(), constant(0.5)], optimizers, progress(), 1.0, False)
    assert not stepped
    for optimizer_rates in rates:
        assert isinstance(optimizer_rates, ScheduledRates)
        optimizer_rates.step(progress(epoch=1))
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == pytest.approx([0.025, 0.05])


def test_torch_schedulers_are_made_for_each_optimizer():
    optimizers = make_optimizers({"body": partial(SGD, lr=1.0), "head": partial(Adam, lr=1.0)}, Net())
    factories = [partial(StepLR, step_size=1), lambda optimizer: ExponentialLR(optimizer, 0.9)]
    rates, schedulers = make_schedulers(factories, optimizers, progress(), 1.0, False)
    assert not rates
    assert [type(scheduler) for scheduler in schedulers] == [StepLR, StepLR, ExponentialLR, ExponentialLR]
    assert [scheduler.optimizer for scheduler in schedulers] == optimizers * 2


def test_a_torch_scheduler_instance_must_belong_to_an_optimizer_of_the_run():
    model = Net()
    optimizer = SGD(model.body.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1)
    _, stepped = make_schedulers(scheduler, make_optimizers(optimizer, model), progress(), 1.0, False)
    assert stepped == [scheduler]
    with pytest.raises(ValueError, match="schedulers=StepLR: its optimizer is not one of this run"):
        make_schedulers(scheduler, make_optimizers(partial(SGD, lr=1.0), model), progress(), 1.0, False)


def test_a_function_of_the_timestamp_may_be_a_schedule():
    def halved(timestamp: Timestamp) -> float:
        return 0.5**timestamp.epoch

    assert rates_of(schedulers=halved) == [1, 1, 1, 0.5, 0.5, 0.5]
    assert rates_of(schedulers=[halved, linear(t_max="6ba")])[3:] == pytest.approx([1 / 4, 1 / 6, 1 / 12])
    for value in (-1, float("nan"), "x", None):
        with pytest.raises(ValueError, match=f"returned {value!r} at batch 0; must be a finite number"):
            rates_of(schedulers=lambda timestamp, value=value: value)


def test_schedules_and_torch_schedulers_cannot_be_mixed():
    optimizers = make_optimizers(partial(SGD, lr=1.0), Net())
    with pytest.raises(ValueError, match="would undo each other"):
        make_schedulers([constant(0.5), partial(StepLR, step_size=1)], optimizers, progress(), 1.0, False)


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
def test_wrong_schedulers_are_named_in_the_error(schedulers: Any, message: str):
    with pytest.raises(TypeError, match=re.escape(message)):
        make_schedulers(schedulers, make_optimizers(partial(SGD, lr=1.0), Net()), progress(), 1.0, False)


def test_a_warmup_longer_than_training_is_refused_before_it_starts():
    with pytest.raises(ValueError, match="t_warmup"):
        make_schedulers(linear(t_warmup="3ep"), make_optimizers(partial(SGD, lr=1.0), Net()), progress(), 1.0, False)


class Rates(Callback):
    """Records the learning rate that each step used."""

    def __init__(self):
        self.rates: list[float] = []

    def after_train_batch(self, state, logger):
        self.rates.append(float(state.optimizers[0].param_groups[0]["lr"]))


def rates_of(**arguments: Any) -> list[float]:
    """Train two epochs of three batches, and return the learning rate of each step."""
    callback = Rates()
    with Trainer(
        model=ClassificationModel(nn.Linear(3, 2), 2),
        train_dataloader=TensorLoader(torch.randn(6, 3), torch.arange(6) % 2, batch_size=2, shuffle=True),
        optimizers=partial(SGD, lr=1.0),
        max_duration="2ep",
        callbacks=[callback],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return callback.rates


def test_torch_schedulers_step_per_epoch_or_batch():
    halve = partial(ExponentialLR, gamma=0.5)
    assert rates_of(schedulers=halve) == [1, 1, 1, 0.5, 0.5, 0.5]
    assert rates_of(schedulers=halve, step_schedulers_every_batch=True) == [0.5**n for n in range(6)]
    assert rates_of(schedulers=[halve, halve]) == [1, 1, 1, 0.25, 0.25, 0.25]


def test_scale_schedule_ratio_shortens_the_schedule_and_the_run():
    halved = rates_of(schedulers=linear(t_max="6ba"), scale_schedule_ratio=0.5)
    assert halved == pytest.approx([1, 2 / 3, 1 / 3])
