from __future__ import annotations

import math
from typing import Any

import pytest
import torch
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
    defaults: dict[str, Any] = {
        "train_dataloader": make_data(),
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


# The examples of the original documentation, with only the imports changed


# Learning rates


class Rates(Callback):
    """Notes each optimizer's learning rate as it is when the optimizers are about to step."""

    def __init__(self):
        self.seen: list[tuple[float, ...]] = []
        self.at: list[tuple[int, float]] = []

    def after_train_batch(self, state, logger):
        self.seen.append(tuple(one.param_groups[0]["lr"] for one in state.optimizers))
        self.at.append((state.timestamp.batch, state.timestamp.epoch + state.timestamp.batch_in_epoch / 4))


def rates(**arguments: Any) -> list[float]:
    seen = Rates()
    with make_trainer(seen, **arguments) as trainer:
        trainer.fit()
    return [one for (one,) in seen.seen]


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
def test_the_rate_of_a_batch_is_the_schedule_at_its_own_timestamp(schedulers, duration, formula, grad_accum: int):
    expected = [0.1 * formula(n) for n in range(8)]
    seen = rates(schedulers=schedulers, max_duration=duration, grad_accum=grad_accum)
    assert seen == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (multi_step(["2ep", "3ep"], gamma=0.1), [0.1] * 4 + [0.01] * 2 + [0.001] * 2),
        (multi_step(["1ep"], gamma=0.1), [0.1] * 2 + [0.01] * 6),
        (linear(t_max="3ep"), [0.1 * (1 - n / 6) for n in range(6)] + [0.0] * 2),
    ],
)
def test_lengths_in_epochs_are_scaled_exactly(schedule: Any, expected: list[float]):
    assert rates(schedulers=schedule, max_duration="4ep", scale_schedule_ratio=0.5) == pytest.approx(expected)


def test_part_of_an_epoch_is_trained_in_batches():
    assert len(rates(max_duration="3ep", scale_schedule_ratio=0.5)) == 6
    assert len(rates(max_duration="1ep", scale_schedule_ratio=0.3)) == 1


# Optimizers


class TinyGAN(Model):
    """Learns to produce numbers near 3; two networks that are trained against each other."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(1, 1)
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.generator(batch[0])

    def training_step(self, state):
        real, noise = state.microbatch[1], state.microbatch[0]
        produced = self.generator(noise)
        judge = nn.functional.softplus
        d_loss = (judge(-self.discriminator(real)) + judge(self.discriminator(produced.detach()))).mean()
        (d_loss * state.loss_scale).backward()
        g_loss = judge(-self.discriminator(produced)).mean()
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
    memory, seen = InMemoryLogger(), Rates()
    with make_gan(seen, loggers=memory, max_duration="50ep", schedulers=linear(alpha_f=0.5)) as trainer:
        state = trainer.state
        assert [len(one.param_groups[0]["params"]) for one in state.optimizers] == [2, 4], "in the order given"
        before = trainer.predict([(torch.zeros(1, 1),)])[0].item()
        trainer.fit()
        after = trainer.predict([(torch.zeros(1, 1),)])[0].item()
    assert abs(after - 3) < abs(before - 3) / 2
    assert seen.seen[0] == pytest.approx((0.02, 0.01)) and seen.seen[100] == pytest.approx((0.015, 0.0075))
    for key in ("loss/train/total", "loss/train/generator", "loss/train/discriminator"):
        assert [t.batch for t, _ in memory.data[key]] == [*range(1, 201)]
    parts = [memory.data[f"loss/train/{name}"][7][1] for name in ("generator", "discriminator")]
    assert memory.data["loss/train/total"][7][1] == pytest.approx(sum(parts))


def test_microbatches_of_a_training_step_give_the_gradient_of_the_batch():
    def weights(grad_accum: int) -> list[torch.Tensor]:
        with make_gan(max_duration="3ba", grad_accum=grad_accum) as trainer:
            trainer.fit()
        return list(trainer.state.unwrapped_model.parameters())

    torch.testing.assert_close(weights(1), weights(4))


@pytest.mark.parametrize("event", ["after_forward", "before_loss", "after_loss", "before_backward"])
def test_a_hook_that_a_training_step_never_calls_is_refused(event: str):
    unseen = type("Mine", (Callback,), {event: lambda self, state, logger: None})()
    with pytest.raises(ValueError, match=f"Mine acts at {event.upper()}, which does not happen with TinyGAN"):
        make_gan(unseen)


def test_the_events_around_a_training_step_still_happen():
    heard: list[str] = []

    class Hears(Callback):
        def run_event(self, event, state, logger):
            heard.append(event.name)

    with make_gan(Hears(), max_duration="1ba", grad_accum=2) as trainer:
        trainer.fit()
    inside = heard[heard.index("BEFORE_TRAIN_BATCH") : heard.index("AFTER_TRAIN_BATCH") + 1]
    step_events = ["BEFORE_FORWARD", "AFTER_BACKWARD"]
    assert inside == ["BEFORE_TRAIN_BATCH", *step_events, *step_events, "AFTER_TRAIN_BATCH"]


# What the trainer logs


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_the_loss_at_step_one_is_that_of_the_first_batch(grad_accum: int):
    memory = InMemoryLogger()
    linear = nn.Linear(3, 2)
    model = ClassificationModel(linear, 2)
    with make_trainer(loggers=memory, max_duration="1ep", grad_accum=grad_accum, model=model) as trainer:
        inputs, targets = next(iter(make_data()))
        with torch.no_grad():
            first = nn.functional.cross_entropy(linear(inputs), targets)
        trainer.fit()
    timestamp, value = memory.data["loss/train/total"][0]
    assert (timestamp.batch, value) == (1, pytest.approx(float(first)))


# Arguments and life


def test_fit_needs_data_and_optimizers():
    for missing in ("train_dataloader", "optimizers"):
        with make_trainer(**{missing: None}) as trainer, pytest.raises(ValueError, match=f"{missing}=None: fit"):
            trainer.fit()


def test_a_model_that_is_no_runner_model_is_refused():
    with pytest.raises(TypeError, match="model=Linear: must be a runner.Model"):
        make_trainer(model=nn.Linear(3, 2))


def test_torchs_generator_is_left_to_the_user():
    """Models that are made one after the other in one process must not be the same."""
    with make_trainer(max_duration="2ba", eval_dataloader=make_data()) as trainer:
        before = torch.get_rng_state()
        trainer.fit()
        assert torch.equal(torch.get_rng_state(), before)
        trainer.eval([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))])
        trainer.predict([torch.zeros(2, 3)])
    assert torch.equal(torch.get_rng_state(), before)


def test_determinism_ends_with_the_trainer_also_when_it_cannot_be_made():
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


def test_what_has_trained_in_one_trainer_is_not_taken_for_new_by_the_next():
    stopper, memory = EarlyStopper("loss"), InMemoryLogger()
    with pytest.raises(TypeError, match="model="):
        Trainer(model=nn.Linear(3, 2), callbacks=[stopper])  # type: ignore[arg-type]
    with make_trainer(stopper, memory, eval_dataloader=make_data()) as trainer:
        trainer.fit(duration="1ba")
        trainer.fit(duration="1ba")
    with make_trainer(memory) as trainer:  # has no state
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


def test_persistent_workers_of_torch_read_for_one_alone():
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="evaluator 'eval': dataloader is the train_dataloader"):
        make_trainer(train_dataloader=loader, eval_dataloader=loader)


def test_persistent_workers_of_ours_do_not_mix_training_and_evaluation():
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    losses = []
    for workers in (0, 1):
        loader = DatasetLoader(data, batch_size=2, shuffle=True, num_workers=workers)
        with make_trainer(train_dataloader=loader, eval_dataloader=loader, eval_interval="1ba") as trainer:
            trainer.fit(duration="6ba")
            losses.append(float(trainer.state.eval_metric_values["eval"]["loss"]))
    assert losses[0] == losses[1]
