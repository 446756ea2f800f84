"""Losses of several parts, and losses that are refused; `test_splitting` has what microbatches make of them."""

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
    """Cross entropy and a penalty on the logits, with or without their own total."""

    def __init__(self, with_total: bool):
        super().__init__(seeded(lambda: nn.Linear(3, 4)), 4)
        self.with_total = with_total

    def loss(self, outputs, batch):
        parts = {"cross_entropy": F.cross_entropy(outputs, batch[1]), "penalty": outputs.square().mean()}
        return parts | {"total": parts["cross_entropy"] + 3 * parts["penalty"]} if self.with_total else parts


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("with_total", [True, False])
def test_several_losses_are_summed_unless_they_hold_their_total(with_total: bool, split: dict[str, Any]):
    model, data = TwoLosses(with_total), class_data(5)
    seen = train(model, data, 5, **split)
    outputs = model.module(data[0])
    parts = {"cross_entropy": F.cross_entropy(outputs, data[1]), "penalty": outputs.square().mean()}
    loss = parts["cross_entropy"] + (3 if with_total else 1) * parts["penalty"]
    assert_equal(seen.gradients[0], gradient(model, loss))
    assert_equal(seen.totals[0], loss.detach())
    assert_equal(seen.parts[0], {name: value.detach() for name, value in parts.items()})


def cross_entropies(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="none")


WRONG: dict[str, tuple[Any, str]] = {
    "no mean": (cross_entropies, "a loss of shape (4,)"),
    "one dimension": (lambda outputs, batch: cross_entropies(outputs, batch).mean().reshape(1), "a loss of shape (1,)"),
    "item": (lambda outputs, batch: cross_entropies(outputs, batch).mean().item(), "a loss of type float"),
    "no return": (lambda outputs, batch: None, "a loss of type NoneType"),
    "two": (lambda outputs, batch: (cross_entropies(outputs, batch).mean(), outputs), "a loss of type tuple"),
    "empty": (lambda outputs, batch: {}, "a loss of type dict"),
    "part": (lambda outputs, batch: {"total": outputs.mean(), "w": 0.5}, "'w' of type float"),
    "parts": (lambda outputs, batch: {"total": outputs.mean(), "each": outputs}, "'each' of shape (4, 4)"),
}


class Wrong(ClassificationModel):
    """Its loss is not what it has to be."""

    def __init__(self, loss: Any):
        super().__init__(seeded(lambda: nn.Linear(3, 4)), 4)
        self.wrong = loss

    def loss(self, outputs, batch):
        return self.wrong(outputs, batch)


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_is_no_number_is_refused_at_the_first_batch(name: str):
    loss, kind = WRONG[name]
    message = re.escape(f"Wrong.loss returned {kind}: it must be a zero-dimensional tensor")
    with pytest.raises(TypeError, match=message):
        train(Wrong(loss), class_data(4), 4)
    data = TensorLoader(*class_data(4), batch_size=4, shuffle=False)
    trainer = Trainer(model=Wrong(loss), eval_dataloader=data, device="cpu")
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
def test_a_loss_without_a_gradient_is_refused_at_the_first_batch_but_evaluated(loss: Any):
    data = TensorLoader(*class_data(4), batch_size=4, shuffle=False)
    arguments: dict[str, Any] = {"optimizers": lambda params: torch.optim.SGD(params, lr=0.1), "device": "cpu"}
    with Trainer(model=Wrong(loss), train_dataloader=data, eval_dataloader=data, **arguments) as trainer:
        trainer.eval()
        with pytest.raises(ValueError, match="Wrong.loss returned a loss without a gradient: compute it from the outp"):
            trainer.fit()


def test_a_part_of_a_loss_needs_no_gradient():
    seen = train(Wrong(lambda outputs, batch: {"total": outputs.mean(), "other": batch[0].mean()}), class_data(4), 4)
    assert_equal(seen.parts[0]["other"], class_data(4)[0].mean())


def test_what_a_training_step_returns_is_looked_at_too():
    class Own(ClassificationModel):
        def training_step(self, state):
            self.loss(self(state.microbatch), state.microbatch).backward()

        def metrics(self, train):
            return {}

    with pytest.raises(TypeError, match="Own.training_step returned a loss of type NoneType: it must"):
        train(Own(seeded(lambda: nn.Linear(3, 4)), 4), class_data(4), 4)


def test_large_counts_of_tokens_are_not_rounded():
    class Huge(LanguageModel):
        def loss_weight(self, batch):
            return torch.tensor(batch)

    parts = fractions(Huge(nn.Embedding(2, 2)), [2**24 + 1, 1])
    assert float(parts[0]) == (2**24 + 1) / (2**24 + 2)
