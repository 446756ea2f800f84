from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runner import Callback, stream_seed
from runner.algorithms import CutMix, LabelSmoothing, MixUp
from runner.algorithms._boxes import cover, draw_boxes
from runner.algorithms._mixing import draw_partners, draw_weight
from runner.algorithms.cutmix import draw_box, paste

KEY = "cutmix"


def reference_gradients(model, batch, alpha: float, smoothing: float = 0.0) -> list[torch.Tensor]:
    """Return the gradients of the blended loss, as in the paper, pixel by pixel."""
    images, targets = batch
    seed = stream_seed(0, KEY, 0)
    top, left, bottom, right = draw_box((4, 4), alpha, False, seed)
    permutation = draw_partners(len(images), seed)
    mixed, replaced = images.clone(), 0
    for row in range(top, bottom):
        for column in range(left, right):
            mixed[:, :, row, column] = images[permutation][:, :, row, column]
            replaced += 1
    assert 0 < replaced < 16
    losses = [
        F.cross_entropy(model.module(mixed), labels, label_smoothing=smoothing)
        for labels in (targets, targets[permutation])
    ]
    ((16 - replaced) / 16 * losses[0] + replaced / 16 * losses[1]).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("interpolate_loss", [False, True])
@pytest.mark.parametrize("grad_accum", [1, 3])
def test_gradients_are_those_of_the_paper(train, make_trainer, interpolate_loss: bool, grad_accum: int):
    algorithm = CutMix(1.0, interpolate_loss=interpolate_loss)
    record = train(algorithm, max_duration="1ba", grad_accum=grad_accum)
    expected = reference_gradients(make_trainer().state.unwrapped_model, record.batches[0], 1.0)
    torch.testing.assert_close(record.gradients[0], expected)


@pytest.mark.parametrize("cutmix_first", [True, False])
def test_cutmix_composes_with_label_smoothing_in_either_order(train, make_trainer, cutmix_first: bool):
    algorithms = [CutMix(), LabelSmoothing(0.2)][:: 1 if cutmix_first else -1]
    record = train(*algorithms, max_duration="1ba", grad_accum=2)
    expected = reference_gradients(make_trainer().state.unwrapped_model, record.batches[0], 1.0, smoothing=0.2)
    torch.testing.assert_close(record.gradients[0], expected)


def test_interpolating_losses_of_smoothed_labels_is_refused(make_trainer):
    with pytest.raises(ValueError, match="interpolate_loss=True"):
        make_trainer(CutMix(interpolate_loss=True), LabelSmoothing())


def test_mixup_share_is_the_probability_that_a_batch_gets_mixup():
    algorithm = CutMix(mixup_share=0.3)
    images = torch.rand(2, 3, 4, 4)
    chosen = []
    for seed in range(2000):
        weight = algorithm.draw(images, seed)
        chosen.append(algorithm._is_mixup)
        algorithm._weight = weight
        if algorithm._is_mixup:
            assert weight == draw_weight(0.2, seed)
            mixed = (1 - weight) * images + weight * images.flip(0)
            torch.testing.assert_close(algorithm.mix(images, images.flip(0)), mixed)
        else:
            assert torch.equal(algorithm.mix(images, images.flip(0)), paste(images, images.flip(0), algorithm._box))
    # torchvision.transforms.v2.RandomChoice draws one of its transforms for each batch, independently.
    assert sum(chosen) / 2000 == pytest.approx(0.3, abs=0.04)
    both = sum(first and second for first, second in itertools.pairwise(chosen))
    assert both / 1999 == pytest.approx(0.09, abs=0.03)


@pytest.mark.parametrize("grad_accum", [1, 3])
def test_a_mixup_share_of_one_gives_the_gradients_of_mixup(train, grad_accum: int):
    mixup, cutmix = MixUp(0.4), CutMix(mixup_share=1.0, mixup_alpha=0.4)
    for algorithm in (mixup, cutmix):
        algorithm.config_key = KEY
    expected, actual = (
        train(algorithm, max_duration="2ba", grad_accum=grad_accum).gradients for algorithm in (mixup, cutmix)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("name", "value"), [("mixup_share", 1.1), ("mixup_share", -0.1), ("mixup_alpha", 0.0)])
def test_mixup_arguments_out_of_range_are_refused(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        CutMix(**{name: value})


def test_integer_images_are_refused_with_a_mixup_share():
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    CutMix().draw(images, 0)
    with pytest.raises(TypeError, match="inputs of torch.uint8: with mixup_share"):
        CutMix(mixup_share=0.01).draw(images, 0)


def test_pasting_changes_only_the_box_of_a_copy():
    images, partners = torch.zeros(2, 3, 5, 6), torch.ones(2, 3, 5, 6)
    pasted = paste(images, partners, (1, 2, 4, 6))
    assert pasted[:, :, 1:4, 2:6].eq(1).all()
    assert pasted.sum() == 2 * 3 * 3 * 4
    assert images.eq(0).all()
    assert torch.equal(paste(images, partners, (3, 3, 3, 3)), images)


def test_boxes_have_the_proportions_of_the_image_and_lie_in_it():
    boxes = torch.tensor([draw_box((20, 40), 1.0, False, seed) for seed in range(3000)])
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 20
    assert boxes[:, 3].max() <= 40
    heights, widths = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert heights.min() >= 0
    inside = (boxes[:, 0] > 0) & (boxes[:, 2] < 20) & (boxes[:, 1] > 0) & (boxes[:, 3] < 40)
    assert (widths[inside] - 2 * heights[inside]).abs().max() <= 1
    # With a large alpha a box covers half of the area: its sides are 0.707 times those of the image.
    boxes = torch.tensor([draw_box((20, 40), 1e6, False, seed) for seed in range(100)])
    assert (boxes[:, 2] - boxes[:, 0]).max() == 14
    assert (boxes[:, 3] - boxes[:, 1]).max() == 28


@pytest.mark.parametrize("length", [1, 4, 5, 9])
def test_uniform_sampling_covers_all_pixels_equally_often(length: int):
    boxes = torch.from_numpy(draw_boxes(20_000, (length, length), (9, 9), True, seed=0))
    chances = cover(boxes[:, None], (9, 9)).float().mean(dim=0)
    torch.testing.assert_close(chances, torch.full((9, 9), (length / (8 + length)) ** 2), atol=0.02, rtol=0)
    boxes = torch.from_numpy(draw_boxes(20_000, (length, length), (9, 9), False, seed=0))
    chances = cover(boxes[:, None], (9, 9)).float().mean(dim=0)
    center, corner = min(length, 9) / 9, (length - length // 2) / 9
    assert chances[4, 4] == pytest.approx(center**2, abs=0.02)
    assert min(chances[0, 0].item(), chances[8, 8].item()) <= corner**2 + 0.02


class Watch(Callback):
    """Stores whether each batch is unchanged after the loss, and which pixels were replaced before it."""

    def __init__(self):
        self.unchanged, self.boxes = [], set()

    def before_train_batch(self, state, logger):
        self.batch, self.copies = state.batch, [part.clone() for part in state.batch]

    def after_forward(self, state, logger):
        replaced = (state.microbatch[0] != state.batch[0]).flatten(1).any(dim=0)
        self.boxes.add(tuple(replaced.tolist()))

    def after_loss(self, state, logger):
        same = state.microbatch is self.batch and state.batch is self.batch
        self.unchanged.append(same and all(map(torch.equal, self.batch, self.copies)))


def test_neither_the_batch_nor_its_targets_are_changed(make_trainer):
    watch = Watch()
    with make_trainer(CutMix(), callbacks=[watch]) as trainer:
        trainer.fit()
    assert watch.unchanged == [True] * 6
    assert len(watch.boxes) > 3  # one for each batch


def test_wrong_arguments_are_refused(train):
    with pytest.raises(ValueError, match="alpha=0"):
        CutMix(0)
    with pytest.raises(ValueError, match=r"needs images \(N, C, H, W\)"):
        train(CutMix(input_key=1))
    with pytest.raises(ValueError, match="one target per image"):
        train(CutMix(target_key=0))
