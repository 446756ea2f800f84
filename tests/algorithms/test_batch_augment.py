from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from runner import Callback, ClassificationModel, Trainer
from runner.algorithms import BatchAugment
from runner.algorithms.batch_augment import flip_images, shift_images
from runner.data import TensorLoader

IMAGES = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_shifts_are_windows_of_the_padded_image(dtype: torch.dtype):
    images = IMAGES.to(dtype)
    padded = F.pad(images, (2, 2, 2, 2))
    for down in range(5):
        for right in range(5):
            shifts = torch.tensor([[down, right], [4 - down, 2]])
            shifted = shift_images(images, shifts, pad=2)
            assert torch.equal(shifted[0], padded[0, :, down : down + 4, right : right + 5])
            assert torch.equal(shifted[1], padded[1, :, 4 - down : 8 - down, 2:7])
    assert torch.equal(shift_images(images, torch.full((2, 2), 2), pad=2), images)


def test_only_the_selected_images_are_flipped():
    flipped = flip_images(IMAGES, torch.tensor([True, False]))
    assert torch.equal(flipped[0], torch.from_numpy(IMAGES[0].numpy()[:, :, ::-1].copy()))
    assert torch.equal(flipped[1], IMAGES[1])


def windows_of(image: torch.Tensor, pad: int) -> list[torch.Tensor]:
    """Return all windows of a padded image that have the image's size."""
    height, width = image.shape[1:]
    padded = F.pad(image, (pad,) * 4)
    offsets = range(2 * pad + 1)
    return [padded[:, i : i + height, j : j + width] for i in offsets for j in offsets]


class Batches(Callback):
    """Stores the indices of the samples of each batch, and their augmented images."""

    def __init__(self):
        self.indices, self.images = [], []

    def batch_start(self, state, logger):
        order = state.train_dataloader.order  # type: ignore[union-attr]
        now = state.timestamp
        self.indices.append(order.indices(now.epoch, now.batch_in_epoch))
        self.images.append(state.batch[0])


def augment(make_trainer, algorithm: BatchAugment, **arguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the indices and the augmented images of each trained batch."""
    batches = Batches()
    with make_trainer(algorithm, callbacks=[batches], eval_interval=0, **arguments) as trainer:
        trainer.fit()
    return [*zip(batches.indices, batches.images, strict=True)]


def originals() -> torch.Tensor:
    """Return the images of the data of `make_trainer`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 2, 4, 4, generator=generator, dtype=torch.float64)


def test_each_image_gets_its_own_shift_and_all_shifts_are_equally_likely(make_trainer):
    batches = augment(make_trainer, BatchAugment(pad=1), max_duration="40ep")
    images, counts = originals(), torch.zeros(9)
    for indices, augmented in batches:
        for index, image in zip(indices, augmented, strict=True):
            matches = [torch.equal(image, window) for window in windows_of(images[index], 1)]
            assert sum(matches) == 1
            counts[matches.index(True)] += 1
    assert counts.sum() == 960
    # About 107 of each are expected; 60 and 154 are five standard deviations away.
    assert counts.min() > 60
    assert counts.max() < 154


def test_half_of_all_images_are_flipped_at_random(make_trainer):
    batches = augment(make_trainer, BatchAugment(pad=0, flip="random"), max_duration="20ep")
    images = originals()
    flipped = [
        torch.equal(image, images[index].flip(2))
        for indices, augmented in batches
        for index, image in zip(indices, augmented, strict=True)
    ]
    assert 180 < sum(flipped) < 300  # of 480


def test_alternating_flips_show_both_sides_of_each_image_in_two_epochs(make_trainer):
    batches = augment(make_trainer, BatchAugment(pad=0, flip="alternating"), max_duration="4ep")
    images = originals()
    sides = torch.zeros(4, 24, dtype=torch.bool)
    for step, (indices, augmented) in enumerate(batches):
        for index, image in zip(indices, augmented, strict=True):
            flipped = torch.equal(image, images[index].flip(2))
            assert flipped or torch.equal(image, images[index])
            sides[step // 3, index] = flipped
    assert torch.equal(sides[0], ~sides[1])
    assert torch.equal(sides[0], sides[2])
    assert 4 < sides[0].sum() < 20


@pytest.mark.parametrize("flip", [None, "random", "alternating"])
def test_microbatches_change_nothing(train, flip: str | None):
    whole = train(BatchAugment(flip=flip))
    split = train(BatchAugment(flip=flip), grad_accum=4)
    torch.testing.assert_close(split.gradients, whole.gradients)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(split.batches, whole.batches, strict=True))


def test_alternating_flips_need_a_dataloader_with_an_order(make_trainer):
    images = originals()
    batches = [(images[:8], torch.zeros(8, dtype=torch.int64))]
    with (
        pytest.raises(ValueError, match="flip='alternating'"),
        make_trainer(BatchAugment(flip="alternating"), train_dataloader=batches) as trainer,
    ):
        trainer.fit()


@pytest.mark.parametrize("arguments", [{"pad": -1}, {"pad": 1.5}, {"flip": "both"}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        BatchAugment(**arguments)


@pytest.mark.parametrize("flip", [None, "random", "alternating"])
def test_a_resumed_run_is_bit_identical(check_resume, flip: str | None):
    check_resume(lambda: [BatchAugment(flip=flip)])


def test_the_error_for_a_batch_without_images_says_how_to_leave_out_the_algorithm():
    loader = TensorLoader(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), batch_size=4, shuffle=False)
    with (
        Trainer(
            model=ClassificationModel(torch.nn.Linear(8, 2), 2),
            train_dataloader=loader,
            optimizers=torch.optim.SGD,
            max_duration="1ba",
            algorithms=[BatchAugment()],
        ) as trainer,
        pytest.raises(ValueError, match=r"needs images \(N, C, H, W\); ~algorithms.batch_augment leaves it out"),
    ):
        trainer.fit()
