"""The gradient of each batch, recorded during training and computed by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner import Callback, Model, Trainer
from runner.data import TensorLoader


class GradientRecorder(Callback):
    """Records the gradients, the total loss and its parts after each batch."""

    def __init__(self):
        self.gradients: list[list[Tensor]] = []
        self.totals: list[Tensor] = []
        self.parts: list[dict[str, Tensor]] = []

    def after_train_batch(self, state, logger):
        self.gradients.append([p.grad.clone() for p in state.unwrapped_model.parameters() if p.grad is not None])
        self.totals.append(state.total_loss.clone())
        self.parts.append(dict(state.loss_parts))


def train(model: Model, data: tuple[Tensor, ...], batch_size: int, **arguments: Any) -> GradientRecorder:
    """Train an epoch at a learning rate of 0, and return the recorded gradients and losses of each batch."""
    recorder = GradientRecorder()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*data, batch_size=batch_size, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.0),
        callbacks=[recorder],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return recorder


def gradient(model: Model, loss: Tensor) -> list[Tensor]:
    """Return the gradient of a loss with respect to each parameter of the model, by torch's autograd alone."""
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


SPLITS: list[dict[str, Any]] = [
    {},
    {"grad_accum": 2},
    {"grad_accum": 4},
    {"grad_accum": 100},
    {"microbatch_size": 1},
    {"microbatch_size": 3},
    {"microbatch_size": 100},
    {"microbatch_size": "auto"},
]
"""Arguments of the Trainer that split a batch into microbatches."""
