from __future__ import annotations

import numpy
import pytest
import torch

from algorithms import RandAugment
from algorithms._image_operations import ALL
from algorithms.rand_augment import rand_augment

IMAGE = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def outcomes(strength: float, depth: int) -> set[bytes]:
    """All images that so many operations of one strength can make of one."""
    found = [IMAGE]
    for _ in range(depth):
        signs = [torch.tensor([sign * strength], dtype=torch.float64) for sign in (-1, 1)]
        found = [operation(image, sign) for image in found for operation in ALL for sign in signs]
    return {image.numpy().round(9).tobytes() for image in found}


@pytest.mark.parametrize("depth", [1, 2])
def test_each_image_goes_through_so_many_operations_of_that_strength(depth: int):
    possible = outcomes(0.6, depth)
    images = rand_augment(IMAGE.expand(1000, -1, -1, -1), 0.6, depth, numpy.random.default_rng(0))
    found = {image[None].numpy().round(9).tobytes() for image in images}
    assert found <= possible
    assert len(found) > (0.95 if depth == 1 else 0.4) * len(possible)


def test_no_operation_changes_nothing():
    assert torch.equal(rand_augment(IMAGE, 1.0, 0, numpy.random.default_rng(0)), IMAGE)


def test_batches_are_changed_each_in_its_way(train):
    changed = train(RandAugment(), max_duration="2ep", shuffle=False).batches
    assert all(images.shape == (8, 2, 4, 4) for images, _ in changed)
    assert not torch.equal(changed[0][0], changed[3][0])  # the same samples, an epoch later


def test_microbatches_change_nothing(train):
    whole, split = train(RandAugment()), train(RandAugment(), grad_accum=4)
    torch.testing.assert_close(split.seen, whole.seen)


@pytest.mark.parametrize("arguments", [{"severity": 0}, {"depth": 0}, {"depth": 1.5}, {"std": -1.0}])
def test_arguments_are_checked(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        RandAugment(**arguments)


def test_resume(check_resume):
    check_resume(lambda: [RandAugment(depth=1)])
