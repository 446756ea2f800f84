"""The Trainer: learning rates, models with their own training step, losses, and what it leaves unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loop_runs import Trace
from tiny_runs import tiny_trainer
from torch import nn

from runner import Callback, ClassificationModel, Model, Trainer
from runner.callbacks import EarlyStopper, InMemoryLogger
from runner.data import DatasetLoader, TensorLoader
from runner.optim.schedulers import constant, cosine_annealing, linear, multi_step, step


def make_data() -> TensorLoader:
    inputs = torch.arange(24.0).view(8, 3) / 24
    return TensorLoader(inputs, torch.arange(8) % 2, batch_size=2, shuffle=False)


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    return tiny_trainer(*callbacks, **({"train_dataloader": make_data()} | arguments))


# Learning rates


class Rates(Callback):
    """Records the learning rate of each optimizer before its step."""

    def __init__(self):
        self.rates: list[tuple[float, ...]] = []

    def after_train_batch(self, state, logger):
        self.rates.append(tuple(optimizer.param_groups[0]["lr"] for optimizer in state.optimizers))


def rates(**arguments: Any) -> list[float]:
    callback = Rates()
    with make_trainer(callback, **arguments) as trainer:
        trainer.fit()
    return [rate for (rate,) in callback.rates]


@pytest.mark.parametrize(
    ("schedulers", "duration", "formula"),
    [
        (None, "2ep", lambda n: 1.0),
        (linear(), "8ba", lambda n: 1 - n / 8),
        (linear(), "2ep", lambda n: 1 - n / 8),
        (linear(t_warmup="4ba"), "8ba", lambda n: n / 4 if n < 4 else 1 - (n - 4) / 4),
        (cosine_annealing(), "16sp", lambda n: (1 + math.cos(math.pi * n / 8)) / 2),
        (step("3ba", gamma=0.5), "8ba", lambda n: 0.5 ** (n // 3)),
        (step("1ep", gamma=0.5), "8ba", lambda n: 0.5 ** (n // 4)),
        ([linear(), step("1ep", gamma=0.5), constant(0.5)], "8ba", lambda n: 0.5 * (1 - n / 8) * 0.5 ** (n // 4)),
    ],
)
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_the_learning_rate_of_a_batch_is_the_schedule_at_its_timestamp(schedulers, duration, formula, grad_accum: int):
    expected = [0.1 * formula(n) for n in range(8)]
    actual = rates(schedulers=schedulers, max_duration=duration, grad_accum=grad_accum)
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (multi_step(["2ep", "3ep"], gamma=0.1), [0.1] * 4 + [0.01] * 2 + [0.001] * 2),
        (multi_step(["1ep"], gamma=0.1), [0.1] * 2 + [0.01] * 6),
        (linear(t_max="3ep"), [0.1 * (1 - n / 6) for n in range(6)] + [0.0] * 2),
    ],
)
def test_scale_schedule_ratio_scales_lengths_in_epochs_exactly(schedule: Any, expected: list[float]):
    assert rates(schedulers=schedule, max_duration="4ep", scale_schedule_ratio=0.5) == pytest.approx(expected)


def test_a_scaled_duration_may_end_within_an_epoch():
    assert len(rates(max_duration="3ep", scale_schedule_ratio=0.5)) == 6
    assert len(rates(max_duration="1ep", scale_schedule_ratio=0.3)) == 1


# Optimizers


class TinyGAN(Model):
    """A generator of numbers near 3 and a discriminator, trained against each other."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(1, 1)
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.generator(batch[0])

    def training_step(self, state):
        real, noise = state.microbatch[1], state.microbatch[0]
        produced = self.generator(noise)
        softplus = nn.functional.softplus
        d_loss = (softplus(-self.discriminator(real)) + softplus(self.discriminator(produced.detach()))).mean()
        (d_loss * state.loss_scale).backward()
        g_loss = softplus(-self.discriminator(produced)).mean()
        (g_loss * state.loss_scale).backward(inputs=list(self.generator.parameters()))
        return {"discriminator": d_loss, "generator": g_loss}


def make_gan(*callbacks: Callback, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    noise, real = torch.randn(64, 1, generator=generator), 3 + 0.1 * torch.randn(64, 1, generator=generator)
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(noise, real, batch_size=16, shuffle=False),
        "optimizers": {
            "generator": lambda params: torch.optim.Adam(params, lr=0.02),
            "discriminator": lambda params: torch.optim.Adam(params, lr=0.01),
        },
    }
    torch.manual_seed(0)
    return make_trainer(*callbacks, model=TinyGAN(), **(defaults | arguments))


def test_two_optimizers_train_a_gan_through_its_training_step():
    memory, callback = InMemoryLogger(), Rates()
    with make_gan(callback, loggers=memory, max_duration="50ep", schedulers=linear(alpha_f=0.5)) as trainer:
        numbers_of_parameters = [len(optimizer.param_groups[0]["params"]) for optimizer in trainer.state.optimizers]
        assert numbers_of_parameters == [2, 4], "optimizers keep the order of the mapping"
        before = trainer.predict([(torch.zeros(1, 1),)])[0].item()
        trainer.fit()
        after = trainer.predict([(torch.zeros(1, 1),)])[0].item()
    assert abs(after - 3) < abs(before - 3) / 2
    assert callback.rates[0] == pytest.approx((0.02, 0.01)) and callback.rates[100] == pytest.approx((0.015, 0.0075))
    for key in ("loss/train/total", "loss/train/generator", "loss/train/discriminator"):
        assert [timestamp.batch for timestamp, _ in memory.data[key]] == [*range(1, 201)]
    parts = [memory.data[f"loss/train/{name}"][7][1] for name in ("generator", "discriminator")]
    assert memory.data["loss/train/total"][7][1] == pytest.approx(sum(parts))


def test_training_steps_on_microbatches_sum_to_the_gradient_of_the_batch():
    def weights(grad_accum: int) -> list[torch.Tensor]:
        with make_gan(max_duration="3ba", grad_accum=grad_accum) as trainer:
            trainer.fit()
        return list(trainer.state.unwrapped_model.parameters())

    torch.testing.assert_close(weights(1), weights(4))


@pytest.mark.parametrize("event", ["after_forward", "before_loss", "after_loss", "before_backward"])
def test_a_hook_that_a_training_step_never_calls_is_refused(event: str):
    callback = type("Mine", (Callback,), {event: lambda self, state, logger: None})()
    with pytest.raises(ValueError, match=f"Mine acts at {event.upper()}, which does not happen with TinyGAN"):
        make_gan(callback)


def test_the_events_before_and_after_a_training_step_still_happen():
    trace = Trace()
    with make_gan(trace, max_duration="1ba", grad_accum=2) as trainer:
        trainer.fit()
    events = trace.events[trace.events.index("BEFORE_TRAIN_BATCH") : trace.events.index("AFTER_TRAIN_BATCH") + 1]
    assert events == ["BEFORE_TRAIN_BATCH", *["BEFORE_FORWARD", "AFTER_BACKWARD"] * 2, "AFTER_TRAIN_BATCH"]


# Losses


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_the_first_loss_is_logged_at_step_one(grad_accum: int):
    memory = InMemoryLogger()
    network = nn.Linear(3, 2)
    model = ClassificationModel(network, 2)
    inputs, targets = next(iter(make_data()))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(network(inputs), targets)
    with make_trainer(loggers=memory, max_duration="1ep", grad_accum=grad_accum, model=model) as trainer:
        trainer.fit()
    timestamp, value = memory.data["loss/train/total"][0]
    assert (timestamp.batch, value) == (1, pytest.approx(float(loss)))


# Arguments, and what a Trainer leaves unchanged


def test_fit_needs_data_and_optimizers():
    for missing in ("train_dataloader", "optimizers"):
        with make_trainer(**{missing: None}) as trainer, pytest.raises(ValueError, match=f"{missing}=None: fit"):
            trainer.fit()


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("max_epochs", 3, "write max_duration='3ep'"),
        ("accumulate_grad_batches", 4, "write grad_accum=4; it divides data.batch_size into that many microbatches"),
        ("gpus", 2, "on the command line, write launch.nproc_per_node=2"),
        ("val_check_interval", "", "write eval_interval='500ba'; ep are epochs, ba batches, dur fractions of training"),
        ("max_steps", [], "write max_duration='...ba'"),
        ("train_dataloaders", [], "did you mean 'train_dataloader'?"),
        ("xyz", 1.0, "help(runner.Trainer) lists its arguments"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_one_that_is_meant(name: str, value: Any, advice: str):
    with pytest.raises(TypeError) as caught:
        make_trainer(**{name: value})
    shown = "list" if value == [] else repr(value)
    assert str(caught.value) == f"{name}={shown}: no such argument; {advice}"


def test_a_model_that_is_no_runner_model_is_refused():
    with pytest.raises(TypeError, match="model=Linear: must be a runner.Model"):
        make_trainer(model=nn.Linear(3, 2))


def test_the_trainer_leaves_the_default_generator_unchanged():
    """Otherwise, models that are made one after the other would have the same weights."""
    with make_trainer(max_duration="2ba", eval_dataloader=make_data()) as trainer:
        before = torch.get_rng_state()
        trainer.fit()
        assert torch.equal(torch.get_rng_state(), before)
        trainer.eval([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))])
        trainer.predict([torch.zeros(2, 3)])
    assert torch.equal(torch.get_rng_state(), before)


def test_deterministic_mode_ends_with_the_trainer_even_if_its_arguments_are_wrong():
    assert not torch.are_deterministic_algorithms_enabled()
    with make_trainer(deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    for wrong in ({"train_dataloader": []}, {"optimizers": "adam"}, {"eval_interval": "often"}):
        with pytest.raises((ValueError, TypeError)):
            make_trainer(deterministic=True, **wrong)
        assert not torch.are_deterministic_algorithms_enabled(), wrong


def test_a_trainer_makes_no_folder_unless_something_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with make_trainer() as trainer:
        trainer.fit()
    assert [*tmp_path.iterdir()] == []
    assert trainer.state.run_name and trainer.state.run_dir.parts == ("outputs", trainer.state.run_name)


def test_a_callback_with_the_state_of_another_trainer_is_refused():
    stopper, memory = EarlyStopper("loss"), InMemoryLogger()
    with pytest.raises(TypeError, match="model="):
        Trainer(model=nn.Linear(3, 2), callbacks=[stopper])  # type: ignore[arg-type]
    with make_trainer(stopper, memory, eval_dataloader=make_data()) as trainer:
        trainer.fit(duration="1ba")
        trainer.fit(duration="1ba")
    with make_trainer(memory) as trainer:  # a logger without state can be used again
        trainer.fit(duration="1ba")
    with pytest.raises(ValueError, match="early_stopper: still has the state of another Trainer"):
        make_trainer(stopper, eval_dataloader=make_data())


@pytest.mark.parametrize("call", [lambda trainer: trainer.eval(5), lambda trainer: trainer.predict(5)])
def test_a_wrong_loader_does_not_close_the_trainer(call: Any):
    with make_trainer() as trainer:
        trainer.fit(duration="1ba")
        with pytest.raises(TypeError, match="must be iterable"):
            call(trainer)
        trainer.fit(duration="1ba")
        assert trainer.state.timestamp.batch == 2


def test_a_torch_loader_with_persistent_workers_cannot_be_shared_with_an_evaluator():
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="evaluator 'eval': dataloader is the train_dataloader"):
        make_trainer(train_dataloader=loader, eval_dataloader=loader)


def test_a_dataset_loader_with_workers_can_be_shared_with_an_evaluator():
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    losses = []
    for workers in (0, 1):
        loader = DatasetLoader(data, batch_size=2, shuffle=True, num_workers=workers)
        with make_trainer(train_dataloader=loader, eval_dataloader=loader, eval_interval="1ba") as trainer:
            trainer.fit(duration="6ba")
            losses.append(float(trainer.state.eval_metric_values["eval"]["loss"]))
    assert losses[0] == losses[1]
