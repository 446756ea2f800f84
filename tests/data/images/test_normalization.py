"""The normalization of images: it equals torchvision's, and each loader declares it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.data import Normalization, TensorLoader, load_digits, load_synthetic_images
from runner.data.images.normalization import IMAGENET
from runner.libraries.torchvision import import_torchvision


def test_values_equal_those_of_torchvision_bit_for_bit():
    pytest.importorskip("torchvision")
    v2 = import_torchvision("torchvision.transforms.v2")
    images = torch.arange(256, dtype=torch.uint8).expand(2, 3, 4, 256)
    expected = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET.mean, IMAGENET.std)])(images)
    normalized, labels = IMAGENET((images, torch.arange(2)))
    assert torch.equal(normalized, expected) and torch.equal(labels, torch.arange(2))


def test_loaders_declare_the_normalization_of_their_images():
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    transform = Normalization([0.5, 0.4, 0.3], 0.2)
    loader = TensorLoader(images, batch_size=4, shuffle=False, transform=transform)
    assert loader.normalization is transform and transform.std == (0.2,)
    for load, known in ((load_digits, ((0.0,), (1.0,))), (load_synthetic_images, None)):
        for make in (load, vars(load)["fake"]):
            declared = make()[0].normalization
            assert (declared and (declared.mean, declared.std)) == known


@pytest.mark.parametrize("std", [0.0, [0.2, -1.0, 0.2], float("nan")])
def test_a_standard_deviation_must_be_positive(std: Any):
    with pytest.raises(ValueError, match=r"^std=.*: must be a number above 0, or one per channel"):
        Normalization(0.5, std)


@pytest.mark.slow
def test_commands_take_the_normalization_from_the_data(run_here: Any, tmp_path: Path):
    command = ("algorithms=[rand_augment,augmix]", "trainer.max_duration=2ba", "callbacks=[checkpoint_saver]")
    run_here(*command, code=0)
    run_here("check", *command, code=0)
    run_here("check", *command, "data=cifar10", "model.module.in_channels=3", code=0)  # made-up batches
    wrong = run_here(*command, "algorithms.augmix.std=0.5", code=2)
    assert "augmix.std=0.5: the data were normalized with std=[1.0]; leave std out" in wrong.err, wrong.err
    for verb in ((), ("check",)):
        unknown = run_here(*verb, *command, "data=synthetic_images", "model.module.in_channels=3", code=2)
        assert "mean=None: the data do not say how images are normalized; set mean and std" in unknown.err, unknown.err
