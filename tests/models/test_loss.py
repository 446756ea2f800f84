"""Losses of several parts, and wrong losses; `test_splitting` tests losses in microbatches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradients import SPLITS, assert_equal, gradient, train
from rank_models import class_data, seeded
from torch import Tensor, nn

from runner import ClassificationModel, LanguageModel, Trainer
from runner.data import TensorLoader
from runner.models.loss import fractions


class TwoLosses(ClassificationModel):
    """Returns cross entropy and a penalty on the logits, with or without a total."""

    def __init__(self, with_total: bool):
        super().__init__(seeded(lambda: nn.Linear(3, 4)), 4)
        self.with_total = with_total

    def loss(self, outputs, batch):
        parts = {"cross_entropy": F.cross_entropy(outputs, batch[1]), "penalty": outputs.square().mean()}
        return parts | {"total": parts["cross_entropy"] + 3 * parts["penalty"]} if self.with_total else parts


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("with_total", [True, False])
def test_the_parts_of_a_loss_are_summed_unless_it_has_a_total(with_total: bool, split: dict[str, Any]):
    model, data = TwoLosses(with_total), class_data(5)
    record = train(model, data, 5, **split)
    outputs = model.module(data[0])
    parts = {"cross_entropy": F.cross_entropy(outputs, data[1]), "penalty": outputs.square().mean()}
    loss = parts["cross_entropy"] + (3 if with_total else 1) * parts["penalty"]
    assert_equal(record.gradients[0], gradient(model, loss))
    assert_equal(record.totals[0], loss.detach())
    assert_equal(record.parts[0], {name: value.detach() for name, value in parts.items()})


def cross_entropies(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="none")


WRONG: dict[str, tuple[Any, str]] = {
    "per sample": (cross_entropies, "a loss of shape (4,)"),
    "one dimension": (lambda outputs, batch: cross_entropies(outputs, batch).mean().reshape(1), "a loss of shape (1,)"),
    "item": (lambda outputs, batch: cross_entropies(outputs, batch).mean().item(), "a loss of type float"),
    "no return": (lambda outputs, batch: None, "a loss of type NoneType"),
    "tuple": (lambda outputs, batch: (cross_entropies(outputs, batch).mean(), outputs), "a loss of type tuple"),
    "empty dict": (lambda outputs, batch: {}, "a loss of type dict"),
    "float part": (lambda outputs, batch: {"total": outputs.mean(), "w": 0.5}, "'w' of type float"),
    "matrix part": (lambda outputs, batch: {"total": outputs.mean(), "each": outputs}, "'each' of shape (4, 4)"),
}


class WithLoss(ClassificationModel):
    """Computes the loss with a function of outputs and batch."""

    def __init__(self, function: Any):
        super().__init__(seeded(lambda: nn.Linear(3, 4)), 4)
        self.function = function

    def loss(self, outputs, batch):
        return self.function(outputs, batch)


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_is_not_a_scalar_tensor_is_refused_at_the_first_batch(name: str):
    loss, description = WRONG[name]
    message = re.escape(f"WithLoss.loss returned {description}: it must be a zero-dimensional tensor")
    with pytest.raises(TypeError, match=message):
        train(WithLoss(loss), class_data(4), 4)
    data = TensorLoader(*class_data(4), batch_size=4, shuffle=False)
    trainer = Trainer(model=WithLoss(loss), eval_dataloader=data, device="cpu")
    with pytest.raises(TypeError, match=message):
        trainer.eval()


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, batch: F.cross_entropy(outputs.detach(), batch[1]),
        lambda outputs, batch: (outputs.argmax(1) != batch[1]).double().mean(),
        lambda outputs, batch: {"total": outputs.mean().detach(), "other": outputs.mean()},
    ],
)
def test_a_loss_without_a_gradient_can_be_evaluated_but_not_trained(loss: Any):
    data = TensorLoader(*class_data(4), batch_size=4, shuffle=False)
    arguments: dict[str, Any] = {"optimizers": lambda params: torch.optim.SGD(params, lr=0.1), "device": "cpu"}
    with Trainer(model=WithLoss(loss), train_dataloader=data, eval_dataloader=data, **arguments) as trainer:
        trainer.eval()
        with pytest.raises(ValueError, match=r"WithLoss\.loss returned a loss without a gradient: compute it from the"):
            trainer.fit()


def test_parts_of_a_loss_need_no_gradient():
    model = WithLoss(lambda outputs, batch: {"total": outputs.mean(), "other": batch[0].mean()})
    record = train(model, class_data(4), 4)
    assert_equal(record.parts[0]["other"], class_data(4)[0].mean())


def test_a_training_step_must_return_a_loss():
    class WithoutReturn(ClassificationModel):
        def training_step(self, state):
            self.loss(self(state.microbatch), state.microbatch).backward()

        def metrics(self, train):
            return {}

    with pytest.raises(TypeError, match=r"WithoutReturn\.training_step returned a loss of type NoneType: it must"):
        train(WithoutReturn(seeded(lambda: nn.Linear(3, 4)), 4), class_data(4), 4)


def test_microbatches_are_weighted_by_exact_counts_even_beyond_float32():
    class WithCounts(LanguageModel):
        def loss_weight(self, batch):
            return torch.tensor(batch)

    first, _ = fractions(WithCounts(nn.Embedding(2, 2)), [2**24 + 1, 1])
    assert float(first) == (2**24 + 1) / (2**24 + 2)
