"""Who steps the optimizers: the run, the scaler of amp_fp16, or a model that says that it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from runner import Callback, Model, Trainer, save_checkpoint
from runner.algorithms import GradientClipping
from runner.data import TensorLoader


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 1, generator=generator), 3 + 0.1 * torch.randn(40, 1, generator=generator)


class GAN(Model):
    """Steps the discriminator twice a batch, then the generator, as GANs are written by hand."""

    manual_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch):
        return self.generator(batch[0])

    def training_step(self, state) -> Any:
        return self.steps(state.microbatch, state.optimizers, state.loss_scale)

    def steps(self, batch, optimizers, scale=1.0, discriminations=2) -> Any:
        noise, real = batch
        to_generate, to_discriminate = optimizers
        judged = torch.zeros(())
        for _ in range(discriminations):
            to_discriminate.zero_grad()
            fake = self.generator(noise).detach()
            judged = (softplus(-self.discriminator(real)) + softplus(self.discriminator(fake))).mean()
            (judged * scale).backward()
            to_discriminate.step()
        to_generate.zero_grad()
        fooled = softplus(-self.discriminator(self.generator(noise))).mean()
        (fooled * scale).backward()
        to_generate.step()
        return {"discriminator": judged, "generator": fooled}


def adam(rate: float) -> Any:
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


def make_trainer(model: Model, *callbacks: Callback, **arguments: Any) -> Trainer:
    given: dict[str, Any] = {
        "train_dataloader": TensorLoader(*make_data(), batch_size=8, shuffle=True),
        "optimizers": {"generator": adam(0.02), "discriminator": adam(0.01)},
        "max_duration": "2ep",
        "device": "cpu",
    }
    return Trainer(model=model, callbacks=callbacks, **(given | arguments))


def make(kind: type[Model] = GAN) -> Model:
    torch.manual_seed(0)
    return kind()


def train(model: Model, *callbacks: Callback, **arguments: Any) -> Trainer:
    with make_trainer(model, *callbacks, **arguments) as trainer:
        trainer.fit()
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [one.detach() for one in trainer.state.unwrapped_model.parameters()]


class Dry(GAN):
    """Without dropout, whose randomness is the run's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))


def test_a_model_that_steps_its_optimizers_is_the_loop_that_one_writes_by_hand():
    trainer = train(make(Dry))
    model: Any = make(Dry)
    optimizers = [adam(0.02)(model.generator.parameters()), adam(0.01)(model.discriminator.parameters())]
    for batch in [*(loader := TensorLoader(*make_data(), batch_size=8, shuffle=True)), *loader]:
        model.steps(batch, optimizers)
    torch.testing.assert_close(weights(trainer), [*model.parameters()], rtol=0, atol=0)
    assert trainer.state.timestamp == "10ba"
    steps = [{int(one["step"]) for one in optimizer.state.values()} for optimizer in trainer.state.optimizers]
    assert steps == [{10}, {20}]
    assert all("step" not in vars(optimizer) for optimizer in trainer.state.optimizers), "they are left as they were"


class Cut(Callback):
    """Saves a checkpoint after the third batch."""

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 3:
            save_checkpoint(state, state.run_dir / "cut")


@pytest.mark.parametrize("arguments", [{}, {"precision": "amp_fp16"}], ids=str)
def test_it_is_resumed_to_the_bit(tmp_path: Path, arguments: dict[str, Any]):
    kind = GAN if not arguments else Once
    whole = train(make(kind), Cut(), run_dir=tmp_path, **arguments)
    again = train(make(kind), resume_path=tmp_path / "cut", run_dir=tmp_path, **arguments)
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)


class Once(GAN):
    """Steps each optimizer once a batch."""

    def steps(self, batch, optimizers, scale=1.0, discriminations=1) -> Any:
        return super().steps(batch, optimizers, scale, discriminations)


def test_half_precision_scales_its_losses_and_leaves_out_a_step_that_overflowed():
    class Overflows(Once):
        def training_step(self, state):
            spoiled = 1e30 if state.timestamp.batch == 4 else 1.0
            return self.steps(state.microbatch, state.optimizers, state.loss_scale * spoiled)

    def run(kind: type[Model]) -> tuple[Trainer, int, float]:
        trainer = train(make(kind), precision="amp_fp16")
        (steps,) = {int(one["step"]) for optimizer in trainer.state.optimizers for one in optimizer.state.values()}
        assert trainer.state.scaler is not None
        return trainer, steps, trainer.state.scaler.get_scale()

    half, steps, scale = run(Once)
    assert run(Overflows)[1:] == (steps - 1, scale / 2)
    moved = [abs(one - before).max() for one, before in zip(weights(half), make(Once).parameters(), strict=True)]
    assert max(moved) < 0.02 * 10 * 1.1, "Adam's steps are at most of the size of the rate"


def test_a_second_step_in_half_precision_is_refused():
    with pytest.raises(RuntimeError, match="precision='amp_fp16': Adam can step only once per batch; use amp_bf16"):
        train(make(), precision="amp_fp16")


class Undecided(GAN):
    """Steps, and does not say so."""

    manual_optimization = False


class Idle(Once):
    """Says that it steps, and does not."""

    def steps(self, batch, optimizers, scale=1.0, discriminations=1):
        loss = self.generator(batch[0]).mean()
        (loss * scale).backward()
        return loss


class Closure(Once):
    def steps(self, batch, optimizers, scale=1.0, discriminations=1):
        optimizers[0].step(lambda: 0.0)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (Undecided, {}, RuntimeError, "Undecided.training_step stepped Adam, which the run steps after it: set manual"),
        (Idle, {}, RuntimeError, "Idle.training_step stepped no optimizer, with manual_optimization=True: call step()"),
        (
            Closure,
            {"precision": "amp_fp16"},
            TypeError,
            "Closure.training_step: Adam.step() takes a closure on",
        ),
        (GAN, {"grad_accum": 2}, ValueError, "grad_accum: GAN has manual_optimization"),
        (GAN, {"microbatch_size": 2}, ValueError, "microbatch_size: GAN has manual_optimization"),
        (GAN, {"microbatch_size": "auto"}, ValueError, "microbatch_size: GAN has manual_optimization"),
        (GAN, {"algorithms": GradientClipping("norm", 1.0)}, ValueError, "GradientClipping acts on gradients before"),
    ],
)
def test_what_is_in_between_is_refused(kind: type[Model], arguments: dict[str, Any], error: Any, message: str):
    with pytest.raises(error, match=re.escape(message)):
        train(make(kind), **arguments)


def test_manual_optimization_needs_a_training_step():
    class Lacks(Model):
        manual_optimization = True

        def forward(self, batch):
            return batch

        def loss(self, outputs, batch):
            return outputs.sum()

    with pytest.raises(TypeError, match="Lacks has manual_optimization=True: define training_step"):
        Lacks()


class Alternates(GAN):
    """Trains one network in even batches and the other in odd ones, and leaves the steps to the run."""

    manual_optimization = False

    def training_step(self, state):
        noise, real = state.microbatch
        if state.timestamp.batch % 2:
            loss = softplus(-self.discriminator(self.generator(noise))).mean()
            parameters = self.generator.parameters()
        else:
            judged = self.discriminator(self.generator(noise).detach())
            loss = (softplus(-self.discriminator(real)) + softplus(judged)).mean()
            parameters = self.discriminator.parameters()
        (loss * state.loss_scale).backward(inputs=[*parameters])
        return loss


@pytest.mark.parametrize(("precision", "discriminator"), [("fp32", 5), ("amp_fp16", 4)])  # the first scale is too large
def test_an_optimizer_without_gradients_does_not_step(precision: str, discriminator: int):
    trainer = train(make(Alternates), precision=precision)
    steps = [{int(one["step"]) for one in optimizer.state.values()} for optimizer in trainer.state.optimizers]
    assert steps == [{5}, {discriminator}]


def test_a_scheduler_of_torch_waits_where_half_precision_leaves_a_step_out():
    class Overflows(Alternates):
        def training_step(self, state):
            state.loss_scale = state.loss_scale * (1e30 if state.timestamp.batch == 3 else 1.0)
            return super().training_step(state)

    def halve(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    trainer = train(
        make(Overflows), precision="amp_fp16", schedulers=halve, step_schedulers_every_batch=True, max_duration="6ba"
    )
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.state.optimizers]
    assert rates == [0.02 * 0.5**2, 0.01 * 0.5**2]  # of three steps each; the discriminator's first overflows
