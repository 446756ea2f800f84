from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from runner import ClassificationModel
from runner.algorithms import AugMix, RandAugment, TrivialAugment
from runner.algorithms import _image_operations as ops
from runner.algorithms._image_operations import ALL
from runner.algorithms.rand_augment import rand_augment
from runner.data import DatasetLoader, Normalization, TensorLoader
from runner.libraries.torchvision import import_torchvision

IMAGE = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def outcomes(strength: float, depth: int) -> set[bytes]:
    """Return all images that `depth` operations of a strength can make of `IMAGE`."""
    images = [IMAGE]
    for _ in range(depth):
        signs = [torch.tensor([sign * strength], dtype=torch.float64) for sign in (-1, 1)]
        images = [operation(image, sign) for image in images for operation in ALL for sign in signs]
    return {image.numpy().round(9).tobytes() for image in images}


@pytest.mark.parametrize("depth", [1, 2])
def test_depth_operations_of_the_strength_are_applied_to_each_image(depth: int):
    possible = outcomes(0.6, depth)
    images = rand_augment(IMAGE.expand(1000, -1, -1, -1), 0.6, depth, numpy.random.default_rng(0))
    actual = {image[None].numpy().round(9).tobytes() for image in images}
    assert actual <= possible
    assert len(actual) > (0.95 if depth == 1 else 0.4) * len(possible)


def test_no_operation_changes_nothing():
    assert torch.equal(rand_augment(IMAGE, 1.0, 0, numpy.random.default_rng(0)), IMAGE)


def test_the_same_samples_are_changed_differently_in_each_epoch(train):
    changed = train(RandAugment(mean=0.5, std=0.2), max_duration="2ep", shuffle=False).batches
    assert all(images.shape == (8, 2, 4, 4) for images, _ in changed)
    assert not torch.equal(changed[0][0], changed[3][0])  # the same samples, an epoch later


@pytest.mark.parametrize("arguments", [{"severity": 0}, {"depth": 0}, {"depth": 1.5}, {"std": -1.0}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        RandAugment(**arguments)


PHOTOS = torch.rand(24, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CLASSES = torch.arange(24) % 3


def loader(images: torch.Tensor, in_memory: bool = True) -> TensorLoader | DatasetLoader:
    if in_memory:
        return TensorLoader(images, CLASSES, batch_size=8, shuffle=False)
    return DatasetLoader(TensorDataset(images, CLASSES), batch_size=8, shuffle=False)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("kind", [RandAugment, AugMix, TrivialAugment])
@pytest.mark.parametrize("mean", [0.5, [0.1, 0.9]], ids=["one", "per channel"])
def test_normalized_images_are_refused_without_their_mean_and_std(train, kind, mean, in_memory: bool):
    normalized = loader((PHOTOS - torch.tensor(mean).view(-1, 1, 1)) / 0.25, in_memory)
    train(kind(mean=mean, std=0.25), train_dataloader=normalized)
    with pytest.raises(ValueError, match=r"mean=\[0.0\], std=\[1.0\].*not between -.* set both") as caught:
        train(kind(mean=0.0, std=1.0), train_dataloader=normalized)
    event = "FIT_START" if in_memory else "AFTER_DATALOADER"
    assert any(f"at {event}, in epoch 1, after 0 batches" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("scale", [255.0, 2.0])
def test_images_of_another_scale_are_refused(train, scale: float):
    with pytest.raises(ValueError, match="set both"):
        train(RandAugment(mean=0.0, std=1.0), train_dataloader=loader(PHOTOS * scale))
    train(RandAugment(mean=0.0, std=1 / scale), train_dataloader=loader(PHOTOS * scale))


def test_only_the_first_batch_is_checked(train):
    images = torch.cat([PHOTOS[:16], PHOTOS[16:] + 3])
    train(RandAugment(mean=0.0, std=1.0), train_dataloader=loader(images, in_memory=False))
    with pytest.raises(ValueError, match="set both"):
        train(RandAugment(mean=0.0, std=1.0), train_dataloader=loader(images.flip(0), in_memory=False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounding_and_interpolation_are_tolerated(train, resnet, dtype: torch.dtype):
    """Black and white pixels are enlarged by bicubic interpolation, which exceeds black and white most."""
    enlarged = F.interpolate((PHOTOS > 0.5).double(), scale_factor=5, mode="bicubic")
    assert enlarged.min() < -0.2
    assert enlarged.max() > 1.2
    normalized = ((enlarged - 0.45) / 0.22).to(dtype).double()
    train(RandAugment(mean=0.45, std=0.22), build=resnet, train_dataloader=loader(normalized), max_duration="1ba")


def test_normalized_data_are_augmented_as_torchvision_augments_raw_images(train, monkeypatch):
    pytest.importorskip("torchvision")
    v2: Any = import_torchvision("torchvision.transforms.v2")
    operations = (ops.solarize, ops.autocontrast, ops.posterize, ops.brightness)
    monkeypatch.setattr("runner.algorithms.rand_augment.ALL", operations)
    pixels = torch.randint(256, (24, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    raw = pixels / 255
    possible = [
        v2.functional.solarize(raw, 0.5),
        v2.functional.autocontrast(raw),
        v2.functional.posterize(pixels, 6) / 255,
        *(v2.functional.adjust_brightness(raw, factor) for factor in (0.55, 1.45)),
    ]
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    expected = torch.stack([v2.functional.normalize(images, mean, std) for images in possible])
    data = TensorLoader(pixels, CLASSES, batch_size=24, shuffle=False, transform=Normalization(mean, std))
    model = ClassificationModel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)), 3)
    options = {"train_dataloader": data, "eval_dataloader": None, "max_duration": "1ba", "model": model}
    ((images, _),) = train(RandAugment(severity=5.0, depth=1, mean=mean), **options).batches
    distances = (images - expected).abs().amax(dim=(2, 3, 4))
    assert distances.amin(dim=0).max() < 1e-5 and len({*distances.argmin(dim=0).tolist()}) == 5
