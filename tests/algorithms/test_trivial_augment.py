from __future__ import annotations

import numpy
import pytest
import torch

from runner.algorithms import TrivialAugment
from runner.algorithms._image_operations import solarize
from runner.algorithms.trivial_augment import trivial_augment


def test_operations_and_strengths_are_uniformly_distributed():
    image = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changed = trivial_augment(image.expand(1400, -1, -1, -1), 1.0, numpy.random.default_rng(0))
    same = (changed == image).flatten(1).all(dim=1).sum().item()
    # 100 get the identity, and 37 each of the translations by less than a pixel.
    assert 130 < same < 220
    darker = (changed.mean(dim=(1, 2, 3)) < 0.2 * image.mean()).sum().item()
    assert 1 <= darker < 25  # a brightness below 0.2 is drawn for 1 / 18 of 100
    assert changed.min() >= 0
    assert changed.max() <= 1


def test_drawn_strengths_do_not_exceed_the_maximum():
    image = torch.full((1, 1, 6, 6), 0.5, dtype=torch.float64)
    changed = trivial_augment(image.expand(700, -1, -1, -1), 0.1, numpy.random.default_rng(0))
    assert changed.amax(dim=(1, 2, 3)).max() <= 0.5 * 1.09 + 1e-9


def test_images_are_changed_in_the_range_from_black_to_white(train, monkeypatch):
    original = train(max_duration="1ba").batches[0][0]  # from about -3 to 3
    monkeypatch.setattr("runner.algorithms.trivial_augment.ALL", (solarize,))
    monkeypatch.setattr("numpy.random.default_rng", lambda seed: Largest())
    changed = train(TrivialAugment(mean=[0.5, 0.4], std=0.1), max_duration="1ba").batches[0][0]
    torch.testing.assert_close(changed, torch.tensor([0.0, 2.0]).view(2, 1, 1) - original)
    clipped = train(TrivialAugment(mean=0.5, std=0.25), max_duration="1ba").batches[0][0]
    assert original.abs().max() > 2
    torch.testing.assert_close(clipped, -original.clamp(-2, 2))


class Largest:
    """A generator that draws the first operation and the largest strength."""

    def integers(self, high: int, size: int) -> numpy.ndarray:
        return numpy.zeros(size, dtype=int)

    def uniform(self, low: float, high: float, size: int) -> numpy.ndarray:
        return numpy.full(size, high)


@pytest.mark.parametrize("arguments", [{"severity": 0}, {"severity": 11.0}, {"std": 0.0}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        TrivialAugment(**arguments)


def test_integer_inputs_and_other_numbers_of_channels_are_refused(train):
    with pytest.raises(ValueError, match="TrivialAugment needs floating-point images"):
        train(TrivialAugment(mean=0.0, std=1.0, input_key=1))
    with pytest.raises(ValueError, match="the images have 2 channels"):
        train(TrivialAugment(mean=[0.5, 0.5, 0.5], std=0.2))
