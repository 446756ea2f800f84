from __future__ import annotations

import numpy
import pytest
import torch

from runner.algorithms import AugMix
from runner.algorithms._image_operations import identity, solarize
from runner.algorithms.augmix import augmix

IMAGES = torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_mixing_weights_add_up_to_one(monkeypatch):
    monkeypatch.setattr("runner.algorithms.augmix.CORE", (identity,))
    torch.testing.assert_close(augmix(IMAGES, 1.0, -1, 3, 0.5, numpy.random.default_rng(0)), IMAGES)


@pytest.mark.parametrize(("width", "alpha"), [(1, 1.0), (3, 0.5), (3, 5.0)])
def test_the_original_image_has_a_mean_weight_of_one_half(monkeypatch, width: int, alpha: float):
    monkeypatch.setattr("runner.algorithms.augmix.CORE", (lambda images, strengths: 1 - images,))
    mixed = augmix(IMAGES, 1.0, 1, width, alpha, numpy.random.default_rng(0))
    # Solve (1 - m) x + m (1 - x) for m.
    shares = ((mixed - IMAGES) / (1 - 2 * IMAGES)).flatten(1)
    torch.testing.assert_close(shares, shares[:, :1].expand(-1, 16), atol=1e-6, rtol=0)
    assert shares[:, 0].mean() == pytest.approx(0.5, abs=0.08)
    assert shares[:, 0].var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.25)  # of Beta(alpha, alpha)


def test_chains_have_the_requested_depth(monkeypatch):
    monkeypatch.setattr("runner.algorithms.augmix.CORE", (lambda images, strengths: images / 2,))

    def exponents(depth: int) -> list[float]:
        # There is one chain: repeat the draws of its weight, and solve for the factor of the chain.
        generator = numpy.random.default_rng(0)
        ratio = (augmix(IMAGES, 1.0, depth, 1, 1.0, generator) / IMAGES)[:, 0, 0, 0].numpy()
        generator = numpy.random.default_rng(0)
        generator.dirichlet([1.0], size=len(IMAGES))
        shares = generator.beta(1.0, 1.0, size=(len(IMAGES), 1))[:, 0]
        return (-numpy.log2(1 - (1 - ratio) / shares)).round(3).tolist()

    assert set(exponents(2)) == {2.0}
    drawn = exponents(-1)
    assert set(drawn) == {1.0, 2.0, 3.0}
    assert all(90 < drawn.count(depth) < 180 for depth in (1.0, 2.0, 3.0))


def test_drawn_strengths_do_not_exceed_the_maximum(monkeypatch):
    monkeypatch.setattr("runner.algorithms.augmix.CORE", (solarize,))
    changed = augmix(IMAGES, 0.2, 1, 1, 1.0, numpy.random.default_rng(0)) != IMAGES
    assert changed.any()
    assert not (changed & (IMAGES < 0.8)).any()


def test_mixed_images_stay_between_black_and_white(train):
    for images, _ in train(AugMix(mean=0.5, std=0.1)).batches:
        assert images.shape == (8, 2, 4, 4)
        assert images.min() >= -5 - 1e-9
        assert images.max() <= 5 + 1e-9


@pytest.mark.parametrize("arguments", [{"severity": 0}, {"depth": 0}, {"depth": -2}, {"width": 0}, {"alpha": 0}])
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        AugMix(**arguments)
