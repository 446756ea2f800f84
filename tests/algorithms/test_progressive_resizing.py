from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import ClassificationModel
from runner.algorithms import ProgressiveResizing
from runner.algorithms._batch import resize
from runner.algorithms.progressive_resizing import crop, scaled_size, scheduled_scale
from runner.callbacks import InMemoryLogger
from runner.data import TensorLoader


@pytest.mark.parametrize(
    ("progress", "scale"),
    [(0.0, 0.5), (0.5, 0.5), (0.65, 0.75), (0.79, 0.5 + 0.5 * 0.29 / 0.3), (0.8, 1.0), (1.0, 1.0)],
)
def test_the_scale_rises_between_delay_and_finetuning(progress: float, scale: float):
    assert scheduled_scale(progress, 0.5, 0.5, 0.2) == pytest.approx(scale)


@pytest.mark.parametrize(("delay", "finetune"), [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_schedules_without_a_phase_rise_to_full_size(delay: float, finetune: float):
    scales = [scheduled_scale(progress / 10, 0.5, delay, finetune) for progress in range(11)]
    assert scales == sorted(scales)
    assert scales[-1] == 1.0
    assert scales[0] == (1.0 if finetune == 1 else 0.5)


@pytest.mark.parametrize(
    ("length", "scale", "increment", "size"),
    [
        (32, 0.5, 4, 16),
        (32, 0.8, 4, 24),
        (32, 0.82, 4, 28),
        (30, 1.0, 4, 30),
        (30, 0.99, 4, 28),
        (30, 0.99, 8, 30),
        (8, 0.1, 4, 4),
    ],
)
def test_sizes_are_multiples_of_the_increment(length: int, scale: float, increment: int, size: int):
    assert scaled_size(length, scale, increment) == size


def test_resizing_equals_that_of_torch_and_keeps_labels():
    images = torch.rand(2, 3, 8, 6)
    expected = F.interpolate(images, (4, 3), mode="bilinear", antialias=True)
    torch.testing.assert_close(resize(images, (4, 3)), expected)
    labels = torch.randint(5, (2, 1, 8, 6))
    expected = F.interpolate(labels.double(), (5, 4), mode="nearest").long()
    assert torch.equal(resize(labels, (5, 4)), expected)


def test_a_crop_is_a_window_of_the_image():
    images = torch.rand(2, 3, 8, 6)
    assert torch.equal(crop(images, (3, 2), (5, 4)), images[:, :, 5:8, 4:6])


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_training_uses_small_images_first_and_logs_their_size(make_trainer, resnet, mode: str):
    memory = InMemoryLogger()
    algorithm = ProgressiveResizing(mode, 0.5, finetune_fraction=0.2, delay_fraction=0.4, size_increment=1)
    with make_trainer(algorithm, build=resnet, max_duration="10ba", loggers=memory) as trainer:
        trainer.fit()
    _, heights = memory.get_timeseries("progressive_resizing/height")
    assert heights == [2, 2, 2, 2, 2, 2, 3, 4, 4, 4]
    assert trainer.state.batch[0].shape[2:] == (4, 4)
    _, scales = memory.get_timeseries("progressive_resizing/scale_factor")
    assert scales == pytest.approx([0.5] * 5 + [0.625, 0.75, 0.875, 1.0, 1.0])


def crops_of(image: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return all square windows of a size in an image of 4 x 4 pixels."""
    return [image[:, i : i + size, j : j + size] for i in range(5 - size) for j in range(5 - size)]


def test_crops_come_from_all_positions(train, resnet):
    algorithm = ProgressiveResizing("crop", 0.5, 0.0, 1.0, size_increment=1)
    arguments = {"build": resnet, "shuffle": False, "max_duration": "40ep"}
    batches = train(algorithm, **arguments).batches
    images = train(build=resnet, shuffle=False, max_duration="1ep").batches
    counts = torch.zeros(9)
    for number, (cropped, _) in enumerate(batches):
        whole = images[number % 3][0]
        windows = zip(*(crops_of(image, 2) for image in whole), strict=True)
        matches = [all(map(torch.equal, cropped, parts)) for parts in windows]
        assert sum(matches) == 1
        counts[matches.index(True)] += 1
    assert counts.min() > 2  # about 13 of each are expected


class Segmentation(ClassificationModel):
    """Classifies each pixel."""


@pytest.mark.parametrize("mode", ["resize", "crop"])
@pytest.mark.parametrize("channels", [None, 1])
def test_image_targets_are_resized_like_inputs(train, mode: str, channels: int | None):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (24, 8, 8), generator=generator)
    images = labels[:, None].double()
    shape = labels if channels is None else images
    loader = TensorLoader(images, shape, batch_size=8, shuffle=True)

    def build() -> Segmentation:
        loss = None if channels is None else F.mse_loss
        return Segmentation(nn.Conv2d(1, 3 if channels is None else 1, 1).double(), 3, loss)

    algorithm = ProgressiveResizing(mode, 0.5, 0.0, 1.0, resize_targets=True)
    data = {"train_dataloader": loader, "eval_dataloader": None}
    for inputs, targets in train(algorithm, build=build, **data).batches:
        assert inputs.shape[2:] == targets.shape[-2:] == (4, 4)
        if mode == "crop" or channels:
            assert torch.equal(inputs, targets.double().view_as(inputs))


def test_resizing_targets_that_are_not_images_is_refused(train, resnet):
    with pytest.raises(ValueError, match="resize_targets=True"):
        train(ProgressiveResizing(size_increment=1, resize_targets=True), build=resnet)


def test_an_initial_scale_of_one_changes_nothing(train):
    plain = train().gradients
    torch.testing.assert_close(train(ProgressiveResizing(initial_scale=1.0)).gradients, plain, rtol=0, atol=0)


def test_microbatches_change_nothing(train, resnet_without_norms):
    algorithm = ProgressiveResizing("crop", size_increment=1)
    whole = train(algorithm, build=resnet_without_norms)
    split = train(algorithm, build=resnet_without_norms, grad_accum=4)
    torch.testing.assert_close(split.gradients, whole.gradients)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "zoom"},
        {"initial_scale": 0},
        {"finetune_fraction": -0.1},
        {"delay_fraction": 0.9},
        {"size_increment": 0},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        ProgressiveResizing(**arguments)


@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_a_resumed_run_is_bit_identical(check_resume, resnet, mode: str):
    check_resume(lambda: [ProgressiveResizing(mode, 0.5, 0.2, 0.2, size_increment=1)], build=resnet)


def test_bfloat16_images_are_resized_like_float32_images():
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(resize(images, (4, 4)), resize(images.float(), (4, 4)).bfloat16(), rtol=0, atol=0)
