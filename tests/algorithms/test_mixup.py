from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from runner import Callback, stream_seed
from runner.algorithms import CutMix, LabelSmoothing, MixUp
from runner.algorithms._mixing import draw_partners, draw_weight, interpolate

KEY = "mixup"


def reference_gradients(model, batch, alpha: float, smoothing: float = 0.0, index: int = 0) -> list[torch.Tensor]:
    """Return the gradients of the interpolated loss, as in the paper, for the batch with this index."""
    images, targets = batch
    seed = stream_seed(0, KEY, index)
    lam, permutation = draw_weight(alpha, seed), draw_partners(len(images), seed)
    logits = model.module((1 - lam) * images + lam * images[permutation])
    losses = [F.cross_entropy(logits, labels, label_smoothing=smoothing) for labels in (targets, targets[permutation])]
    ((1 - lam) * losses[0] + lam * losses[1]).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("interpolate_loss", [False, True])
@pytest.mark.parametrize("grad_accum", [1, 3, 4])
def test_gradients_are_those_of_the_paper(train, make_trainer, interpolate_loss: bool, grad_accum: int):
    record = train(MixUp(0.7, interpolate_loss), max_duration="1ba", grad_accum=grad_accum)
    expected = reference_gradients(make_trainer().state.unwrapped_model, record.batches[0], 0.7)
    torch.testing.assert_close(record.gradients[0], expected)


@pytest.mark.parametrize("mixup_first", [True, False])
@pytest.mark.parametrize("grad_accum", [1, 4])
def test_mixup_composes_with_label_smoothing_in_either_order(train, make_trainer, mixup_first: bool, grad_accum: int):
    algorithms = [MixUp(0.7), LabelSmoothing(0.2)]
    record = train(*algorithms[:: 1 if mixup_first else -1], max_duration="1ba", grad_accum=grad_accum)
    expected = reference_gradients(make_trainer().state.unwrapped_model, record.batches[0], 0.7, smoothing=0.2)
    torch.testing.assert_close(record.gradients[0], expected)


def test_interpolating_losses_of_smoothed_labels_is_refused(make_trainer):
    with pytest.raises(ValueError, match="interpolate_loss=True"):
        make_trainer(MixUp(interpolate_loss=True), LabelSmoothing())


@pytest.mark.parametrize("other", [CutMix(), MixUp()])
def test_two_mixing_algorithms_are_refused(make_trainer, other):
    with pytest.raises(ValueError, match="cannot be combined"):
        make_trainer(MixUp(), other)


def test_weights_follow_the_beta_distribution_and_partners_are_a_permutation():
    weights = torch.tensor([draw_weight(1.0, seed) for seed in range(2000)])
    permutations = [draw_partners(5, seed).tolist() for seed in range(2000)]
    # For alpha = 1 lambda is uniform in [0, 0.5].
    assert weights.min() >= 0
    assert weights.max() <= 0.5
    torch.testing.assert_close(
        weights.quantile(torch.tensor([0.25, 0.5, 0.75])), torch.tensor([0.125, 0.25, 0.375]), atol=0.02, rtol=0
    )
    assert all(sorted(permutation) == list(range(5)) for permutation in permutations)
    assert len({tuple(permutation) for permutation in permutations}) == 120
    small = torch.tensor([draw_weight(0.2, seed) for seed in range(2000)])
    assert small.mean() < weights.mean()


def test_a_weight_of_zero_changes_nothing():
    values = torch.randn(4, 3)
    assert torch.equal(interpolate(values, values.flip(0), 0.0), values)


class Watch(Callback):
    """Stores each batch and a copy of it before training, and the batch and microbatch after the loss."""

    def __init__(self):
        self.before, self.after = [], []

    def before_train_batch(self, state, logger):
        self.before.append((state.batch, [part.clone() for part in state.batch]))

    def after_loss(self, state, logger):
        self.after.append((state.batch, state.microbatch))


def test_neither_the_batch_nor_its_targets_are_changed(make_trainer):
    watch = Watch()
    with make_trainer(MixUp(1.0), callbacks=[watch]) as trainer:
        trainer.fit()
    for (batch, copies), (later, microbatch) in zip(watch.before, watch.after, strict=True):
        assert later is batch
        assert microbatch is batch
        assert all(torch.equal(part, copy) for part, copy in zip(batch, copies, strict=True))


def test_each_batch_has_its_own_draw(train, make_trainer):
    record = train(MixUp(0.7), optimizers=lambda params: torch.optim.SGD(params, lr=0.0))  # keeps the weights
    for index, (batch, actual) in enumerate(zip(record.batches, record.gradients, strict=True)):
        expected = reference_gradients(make_trainer().state.unwrapped_model, batch, 0.7, index=index)
        torch.testing.assert_close(actual, expected)
    assert len({draw_weight(0.7, stream_seed(0, KEY, index)) for index in range(6)}) == 6


def test_wrong_arguments_are_refused(train):
    with pytest.raises(ValueError, match="alpha=0"):
        MixUp(0)
    with pytest.raises(TypeError, match="floating-point inputs only"):
        train(MixUp(input_key=1))
