from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import Callback, ClassificationModel, LanguageModel
from runner.algorithms import BatchAugment, CutOut, InfoBatch, LabelSmoothing, MixUp, SelectiveBackprop
from runner.algorithms.info_batch import draw_weights
from runner.data import TensorLoader
from runner.models import GPT

LOSSES = torch.tensor([0.1, 0.2, 0.3, 5.0, 6.0, torch.inf])  # the last loss is unknown


def test_mean_weights_are_one_and_hard_samples_are_always_kept():
    weights = torch.stack([draw_weights(LOSSES, 0.75, seed) for seed in range(4000)])
    assert set(weights[:, :3].unique().tolist()) == {0.0, 4.0}
    assert weights[:, 3:].eq(1).all()
    torch.testing.assert_close(weights.mean(dim=0), torch.ones(6), atol=0.12, rtol=0)


def test_nothing_is_dropped_while_losses_are_unknown():
    assert draw_weights(torch.full((5,), torch.inf), 0.9, 0).eq(1).all()
    assert draw_weights(LOSSES, 0.0, 0).eq(1).all()


class Watch(Callback):
    """Stores the samples, weights, gradients and initial model of each batch, and the scores after each epoch."""

    def __init__(self):
        self.kept, self.weights, self.gradients, self.models, self.scores = [], [], [], [], []

    def before_train_batch(self, state, logger):
        (algorithm,) = (algorithm for algorithm in state.algorithms if isinstance(algorithm, InfoBatch))
        now = state.timestamp
        loader: Any = state.train_dataloader
        indices = loader.order.indices(now.epoch, now.batch_in_epoch)
        weights = algorithm.state_dict()["weights"][indices]
        kept = indices[weights > 0]
        self.kept.append(kept)
        self.weights.append(weights)
        expected = loader.tensors[0][kept]
        assert torch.equal(state.batch[0], expected) or not len(kept)
        self.models.append({name: value.clone() for name, value in state.unwrapped_model.state_dict().items()})

    def after_train_batch(self, state, logger):
        parameters = state.unwrapped_model.parameters()
        self.gradients.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])

    def epoch_end(self, state, logger):
        self.scores.append(state.algorithms[0].state_dict()["scores"].clone())


@pytest.mark.parametrize("grad_accum", [1, 3])
def test_gradients_are_those_of_the_weighted_batch(make_trainer, grad_accum: int):
    watch = Watch()
    arguments = {"callbacks": [watch], "max_duration": "4ep", "grad_accum": grad_accum}
    with make_trainer(InfoBatch(0.7, 1.0), **arguments) as trainer:
        trainer.fit()
    assert [len(kept) for kept in watch.kept[:3]] == [8, 8, 8]
    assert min(len(kept) for kept in watch.kept) < 7
    images, targets = trainer.state.train_dataloader.tensors
    batches = zip(watch.weights, watch.kept, watch.models, watch.gradients, strict=True)
    for weights, kept, before, gradients in batches:
        model = make_trainer().state.unwrapped_model
        model.load_state_dict(before)
        losses = F.cross_entropy(model.module(images[kept]), targets[kept], reduction="none")
        (losses * weights[weights > 0]).sum().div(len(weights)).backward()
        expected = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)


def test_scores_are_the_latest_losses_of_each_sample(make_trainer):
    watch = Watch()
    with make_trainer(InfoBatch(0.7, 1.0), callbacks=[watch], max_duration="3ep") as trainer:
        trainer.fit()
    images, targets = trainer.state.train_dataloader.tensors
    expected = torch.full((24,), torch.inf, dtype=torch.float64)
    for number, (kept, before) in enumerate(zip(watch.kept, watch.models, strict=True)):
        model = make_trainer().state.unwrapped_model
        model.load_state_dict(before)
        expected[kept] = F.cross_entropy(model.module(images[kept]), targets[kept], reduction="none").detach()
        if number % 3 == 2:
            torch.testing.assert_close(watch.scores[number // 3].double(), expected)


def test_a_batch_without_kept_samples_trains_nothing(make_trainer):
    losses = []

    class Losses(Callback):
        def after_train_batch(self, state, logger):
            losses.append((len(state.batch[0]), state.total_loss.item()))

    # Only one of 24 samples is hard: most batches of 8 keep no sample, and train on one sample without weight.
    images, targets = torch.zeros(24, 2, 4, 4, dtype=torch.float64), torch.zeros(24, dtype=torch.int64)
    targets[5] = 1
    loader = TensorLoader(images, targets, batch_size=8, shuffle=True)
    arguments = {"callbacks": [Losses()], "max_duration": "30ba", "train_dataloader": loader}
    with make_trainer(InfoBatch(0.99, 1.0), **arguments) as trainer:
        trainer.fit()
    assert [size for size, _ in losses[:3]] == [8, 8, 8]
    assert any((size, loss) == (1, 0.0) for size, loss in losses[3:])


def test_pruning_nothing_changes_nothing(train):
    plain = train(batch_norm=True).gradients
    torch.testing.assert_close(train(InfoBatch(0.0), batch_norm=True).gradients, plain, rtol=0, atol=0)
    torch.testing.assert_close(train(InfoBatch(0.5, delta=0.0), batch_norm=True).gradients, plain, rtol=0, atol=0)


def test_the_last_epochs_drop_nothing(train):
    sizes = [len(images) for images, _ in train(InfoBatch(0.7, delta=0.5), max_duration="4ep").batches]
    assert sizes[:3] == sizes[6:9] == sizes[9:] == [8, 8, 8]
    assert sum(sizes[3:6]) < 24


def test_scores_are_losses_of_smoothed_targets(make_trainer):
    with make_trainer(InfoBatch(0.7, 1.0), LabelSmoothing(0.5), CutOut(), max_duration="4ep", grad_accum=2) as trainer:
        names = [type(algorithm).__name__ for algorithm in trainer.state.algorithms]
        assert names == ["LabelSmoothing", "InfoBatch", "CutOut"]
        trainer.fit()
        (algorithm,) = (algorithm for algorithm in trainer.state.algorithms if isinstance(algorithm, InfoBatch))
        # With half of each target spread over three classes, no loss is below the entropy of the target.
        entropy = -(2 / 3 * torch.tensor(2 / 3).log() + 1 / 3 * torch.tensor(1 / 6).log()).item()
        assert algorithm.state_dict()["scores"].min() > entropy


@pytest.mark.parametrize("other", [MixUp(), SelectiveBackprop(), BatchAugment(flip="alternating")])
def test_conflicting_algorithms_are_refused(make_trainer, other):
    with pytest.raises(ValueError, match="cannot be combined|flip='alternating'"):
        make_trainer(InfoBatch(), other)


def test_models_and_data_that_cannot_be_weighted_are_refused(make_trainer):
    model = LanguageModel(GPT(vocab_size=4, context=8, d_model=4, n_layers=1, n_heads=1))
    with pytest.raises(ValueError, match="the loss of LanguageModel is not a mean over samples"):
        make_trainer(InfoBatch(), build=lambda: model)
    batches = [(torch.zeros(8, 2, 4, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))]
    with (
        pytest.raises(ValueError, match="has no `order`"),
        make_trainer(InfoBatch(), train_dataloader=batches) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("arguments", [{"prune": 1}, {"prune": -0.1}, {"delta": 1.5}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        InfoBatch(**arguments)


@pytest.mark.parametrize("stop_at", [4, 5])
def test_a_resumed_run_is_bit_identical(check_resume, stop_at: int):
    check_resume(lambda: [InfoBatch(0.7, 1.0)], stop_at=stop_at)


class TwoLosses(ClassificationModel):
    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        return {"total": loss + outputs.square().mean(), "entropy": loss}


def test_a_model_with_several_losses_keeps_their_parts(make_trainer):
    def build() -> TwoLosses:
        torch.manual_seed(0)
        return TwoLosses(nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).double(), 3)

    with make_trainer(InfoBatch(0.7, 1.0), build=build, max_duration="4ep") as trainer:
        trainer.fit()
        assert list(trainer.state.loss_parts) == ["entropy"]
