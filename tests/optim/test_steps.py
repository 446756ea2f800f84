"""Optimizer steps by the run, with the loss scaling of amp_fp16, or by a model with manual optimization."""

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
    """Steps the discriminator twice per batch, then the generator."""

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
        generator_optimizer, discriminator_optimizer = optimizers
        discriminator_loss = torch.zeros(())
        for _ in range(discriminations):
            discriminator_optimizer.zero_grad()
            fake = self.generator(noise).detach()
            discriminator_loss = (softplus(-self.discriminator(real)) + softplus(self.discriminator(fake))).mean()
            (discriminator_loss * scale).backward()
            discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = softplus(-self.discriminator(self.generator(noise))).mean()
        (generator_loss * scale).backward()
        generator_optimizer.step()
        return {"discriminator": discriminator_loss, "generator": generator_loss}


def adam(rate: float) -> Any:
    return lambda parameters: torch.optim.Adam(parameters, lr=rate)


def make_trainer(model: Model, *callbacks: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "train_dataloader": TensorLoader(*make_data(), batch_size=8, shuffle=True),
        "optimizers": {"generator": adam(0.02), "discriminator": adam(0.01)},
        "max_duration": "2ep",
        "device": "cpu",
    }
    return Trainer(model=model, callbacks=callbacks, **(defaults | arguments))


def make(model_class: type[Model] = GAN) -> Model:
    torch.manual_seed(0)
    return model_class()


def train(model: Model, *callbacks: Callback, **arguments: Any) -> Trainer:
    with make_trainer(model, *callbacks, **arguments) as trainer:
        trainer.fit()
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach() for parameter in trainer.state.unwrapped_model.parameters()]


def step_counts(trainer: Trainer) -> list[set[int]]:
    """Return the different numbers of steps in the state of each optimizer."""
    return [{int(state["step"]) for state in optimizer.state.values()} for optimizer in trainer.state.optimizers]


class WithoutDropout(GAN):
    """Draws no random numbers, because those of a run differ from those of a hand-written loop."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))


def test_manual_optimization_equals_a_hand_written_loop():
    trainer = train(make(WithoutDropout))
    model: Any = make(WithoutDropout)
    optimizers = [adam(0.02)(model.generator.parameters()), adam(0.01)(model.discriminator.parameters())]
    loader = TensorLoader(*make_data(), batch_size=8, shuffle=True)
    for batch in [*loader, *loader]:
        model.steps(batch, optimizers)
    torch.testing.assert_close(weights(trainer), [*model.parameters()], rtol=0, atol=0)
    assert trainer.state.timestamp == "10ba"
    assert step_counts(trainer) == [{10}, {20}]
    assert all("step" not in vars(optimizer) for optimizer in trainer.state.optimizers), "step() is still wrapped"


class SaveThirdBatch(Callback):
    """Saves a checkpoint after the third batch."""

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 3:
            save_checkpoint(state, state.run_dir / "saved")


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_manual_optimization_resumes_bit_for_bit(tmp_path: Path, precision: str):
    model_class = GAN if precision == "fp32" else Once
    whole = train(make(model_class), SaveThirdBatch(), run_dir=tmp_path, precision=precision)
    resumed = train(make(model_class), resume_path=tmp_path / "saved", run_dir=tmp_path, precision=precision)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


class Once(GAN):
    """Steps each optimizer once per batch."""

    def steps(self, batch, optimizers, scale=1.0, discriminations=1) -> Any:
        return super().steps(batch, optimizers, scale, discriminations)


def test_half_precision_skips_a_step_that_overflows_and_halves_the_scale():
    class Overflows(Once):
        def training_step(self, state):
            factor = 1e30 if state.timestamp.batch == 4 else 1.0
            return self.steps(state.microbatch, state.optimizers, state.loss_scale * factor)

    def run(model_class: type[Model]) -> tuple[Trainer, int, float]:
        """Return the trainer, the number of steps, and the loss scale."""
        trainer = train(make(model_class), precision="amp_fp16")
        (steps,) = set.union(*step_counts(trainer))
        assert trainer.state.scaler is not None
        return trainer, steps, trainer.state.scaler.get_scale()

    trainer, steps, scale = run(Once)
    assert run(Overflows)[1:] == (steps - 1, scale / 2)
    changes = [abs(end - start).max() for end, start in zip(weights(trainer), make(Once).parameters(), strict=True)]
    assert max(changes) < 0.02 * 10 * 1.1, "a step of Adam is about as large as the learning rate"


def test_a_second_step_in_half_precision_is_refused():
    with pytest.raises(RuntimeError, match="precision='amp_fp16': Adam can step only once per batch; use amp_bf16"):
        train(make(), precision="amp_fp16")


class Undeclared(GAN):
    """Steps its optimizers without `manual_optimization`."""

    manual_optimization = False


class Idle(Once):
    """Has `manual_optimization`, but does not step."""

    def steps(self, batch, optimizers, scale=1.0, discriminations=1):
        loss = self.generator(batch[0]).mean()
        (loss * scale).backward()
        return loss


class Closure(Once):
    def steps(self, batch, optimizers, scale=1.0, discriminations=1):
        optimizers[0].step(lambda: 0.0)


@pytest.mark.parametrize(
    ("model_class", "arguments", "error", "message"),
    [
        (Undeclared, {}, RuntimeError, "Undeclared.training_step stepped Adam, which the run steps after it: set man"),
        (Idle, {}, RuntimeError, "Idle.training_step stepped no optimizer, with manual_optimization=True: call step()"),
        (Closure, {"precision": "amp_fp16"}, TypeError, "Closure.training_step: Adam.step() takes a closure only"),
        (GAN, {"grad_accum": 2}, ValueError, "grad_accum: GAN has manual_optimization"),
        (GAN, {"microbatch_size": 2}, ValueError, "microbatch_size: GAN has manual_optimization"),
        (GAN, {"microbatch_size": "auto"}, ValueError, "microbatch_size: GAN has manual_optimization"),
        (GAN, {"algorithms": GradientClipping("norm", 1.0)}, ValueError, "GradientClipping acts on gradients before"),
    ],
)
def test_options_that_contradict_manual_optimization_are_refused(
    model_class: type[Model], arguments: dict[str, Any], error: Any, message: str
):
    with pytest.raises(error, match=re.escape(message)):
        train(make(model_class), **arguments)


def test_manual_optimization_needs_a_training_step():
    class Incomplete(Model):
        manual_optimization = True

        def forward(self, batch):
            return batch

        def loss(self, outputs, batch):
            return outputs.sum()

    with pytest.raises(TypeError, match="Incomplete has manual_optimization=True: define training_step"):
        Incomplete()


class Alternates(GAN):
    """Trains the discriminator in even batches and the generator in odd ones; the run steps the optimizers."""

    manual_optimization = False

    def training_step(self, state):
        noise, real = state.microbatch
        if state.timestamp.batch % 2:
            loss = softplus(-self.discriminator(self.generator(noise))).mean()
            parameters = self.generator.parameters()
        else:
            fake = self.generator(noise).detach()
            loss = (softplus(-self.discriminator(real)) + softplus(self.discriminator(fake))).mean()
            parameters = self.discriminator.parameters()
        (loss * state.loss_scale).backward(inputs=[*parameters])
        return loss


# With amp_fp16 the initial loss scale is too large, so the first step is skipped.
@pytest.mark.parametrize(("precision", "discriminator_steps"), [("fp32", 5), ("amp_fp16", 4)])
def test_an_optimizer_without_gradients_does_not_step(precision: str, discriminator_steps: int):
    assert step_counts(train(make(Alternates), precision=precision)) == [{5}, {discriminator_steps}]


def test_torchs_scheduler_does_not_step_after_half_precision_skips_a_step():
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
    # Each optimizer has gradients in three batches, of which one overflows.
    assert rates == [0.02 * 0.5**2, 0.01 * 0.5**2]
