"""Gradients of microbatches against the gradient of the whole batch, computed by hand in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Callback, ClassificationModel, LanguageModel, Model, Trainer
from runner.data import TensorLoader
from runner.models.loss import fractions

VOCABULARY = 7


class Seen(Callback):
    """Gradients, the total loss and its parts after each batch."""

    def __init__(self):
        self.gradients: list[list[Tensor]] = []
        self.totals: list[Tensor] = []
        self.parts: list[dict[str, Tensor]] = []

    def after_train_batch(self, state, logger):
        self.gradients.append([p.grad.clone() for p in state.unwrapped_model.parameters() if p.grad is not None])
        self.totals.append(state.total_loss.clone())
        self.parts.append(dict(state.loss_parts))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double()


def classifier() -> Model:
    return ClassificationModel(seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))), 4)


def language_model() -> Model:
    return LanguageModel(seeded(lambda: nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY))))


def class_data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (num_samples,), generator=generator)


def token_data(valid: list[int], length: int = 6) -> tuple[Tensor, Tensor]:
    """Sequences of which the first `valid[i]` targets count."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (len(valid), length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, count in enumerate(valid):
        targets[row, count:] = -100
    return tokens[:, :-1].contiguous(), targets


def train(model: Model, data: tuple[Tensor, ...], batch_size: int, **arguments: Any) -> Seen:
    """What each batch of one epoch gave, with weights that stay as they are."""
    seen = Seen()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*data, batch_size=batch_size, shuffle=False),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.0),
        callbacks=[seen],
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return seen


def gradient(model: Model, loss: Tensor) -> list[Tensor]:
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


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(5, 4), (5, 5), (10, 8), (7, 4)])
def test_microbatches_give_the_gradient_of_the_batch(num_samples: int, batch_size: int, split: dict[str, Any]):
    # (5, 4) in fours: five microbatches in windows of four, the second window having one of them.
    model, data = classifier(), class_data(num_samples)
    seen = train(model, data, batch_size, **split)
    batches = [tuple(t[i : i + batch_size] for t in data) for i in range(0, num_samples, batch_size)]
    assert len(seen.gradients) == len(batches)
    for actual, total, (inputs, targets) in zip(seen.gradients, seen.totals, batches, strict=True):
        loss = F.cross_entropy(model.get_submodule("module")(inputs), targets)
        assert_equal(actual, gradient(model, loss))
        assert_equal(total, loss.detach())


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    "valid", [[6, 1, 2, 5, 3], [6, 0, 0, 4, 0], [0, 0, 0, 0, 6], [1, 1, 1, 1, 1]], ids=lambda v: "-".join(map(str, v))
)
def test_ragged_token_counts_give_the_gradient_of_the_batch(valid: list[int], split: dict[str, Any]):
    model, data = language_model(), token_data(valid)
    seen = train(model, data, len(valid), **split)
    logits = model.get_submodule("module")(data[0])
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), data[1].reshape(-1), ignore_index=-100)
    assert_equal(seen.gradients[0], gradient(model, loss))
    assert_equal(seen.totals[0], loss.detach())


@pytest.mark.parametrize("split", [{}, {"grad_accum": 3}], ids=str)
def test_a_batch_without_any_valid_target_changes_nothing(split: dict[str, Any]):
    seen = train(language_model(), token_data([0, 0, 0]), 3, **split)
    assert all(not g.any() for g in seen.gradients[0])
    assert float(seen.totals[0]) == 0.0


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


def test_a_loss_can_weigh_by_anything():
    class PerPixel(ClassificationModel):
        """Its loss is a mean over the positive inputs."""

        def loss(self, outputs, batch):
            mask = batch[0] > 0
            per_sample = F.cross_entropy(outputs, batch[1], reduction="none")
            return (per_sample * mask.sum(1)).sum() / mask.sum()

        def loss_weight(self, batch):
            return int((batch[0] > 0).sum())  # plain numbers will do

    model, data = PerPixel(seeded(lambda: nn.Linear(3, 4)), 4), class_data(9)
    data[0][:, 0] = 1.0
    seen = train(model, data, 9, grad_accum=4)
    whole = model.loss(model(data), data)
    assert_equal(seen.gradients[0], gradient(model, whole))


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
