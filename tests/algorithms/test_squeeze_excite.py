from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner.algorithms import Factorize, SqueezeExcite
from runner.algorithms.squeeze_excite import squeeze_excite


def test_channels_are_scaled_as_in_the_paper():
    images = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    layers: Any = nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 6, bias=False),
        nn.Sigmoid(),
    ).double()
    expected = images * layers(images)[:, :, None, None]
    torch.testing.assert_close(squeeze_excite(images, layers[2], layers[4]), expected)


def test_weights_of_zero_halve_each_channel():
    images = torch.randn(2, 6, 3, 3)
    assert torch.equal(squeeze_excite(images, torch.zeros_like, torch.zeros_like), images / 2)


@pytest.mark.parametrize(("latent", "width"), [(5, 5), (0.25, 2), (0.01, 1)])
def test_channel_attention_is_added_after_wide_convolutions(make_trainer, resnet, latent: float, width: int):
    with make_trainer(SqueezeExcite(latent, min_channels=5), build=resnet) as trainer:
        blocks = trainer.state.unwrapped_model.module.blocks
        assert all(type(conv) is nn.Conv2d for conv in (blocks[0].conv1, blocks[0].conv2, blocks[1].conv1))
        for sequence in (blocks[1].conv2, blocks[2].conv1, blocks[2].conv2, blocks[2].shortcut[0]):
            conv, attention = sequence
            if conv.out_channels == 8:
                assert attention.reduce.weight.shape == (width, 8)
            images = torch.randn(2, conv.in_channels, 4, 4, dtype=torch.float64)
            expected = squeeze_excite(conv(images), attention.reduce, attention.expand)
            torch.testing.assert_close(sequence(images), expected)


def test_new_weights_are_drawn_from_the_seed_and_trained(make_trainer, resnet):
    def run(seed: int) -> list[torch.Tensor]:
        torch.randn(seed + 1)  # earlier draws do not change the weights
        random_state = torch.get_rng_state()
        with make_trainer(SqueezeExcite(0.5, min_channels=5), build=resnet, seed=seed) as trainer:
            assert torch.equal(torch.get_rng_state(), random_state)
            weight = trainer.state.unwrapped_model.module.blocks[1].conv2[1].reduce.weight
            initial = weight.detach().clone()
            trainer.fit()
            return [initial, weight.detach().clone()]

    first, again, other = run(0), run(0), run(1)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_layers_of_the_attention_may_be_factorized(make_trainer, resnet):
    factorize = Factorize(min_channels=99, min_features=5, latent_features=1)
    with make_trainer(factorize, SqueezeExcite(5, min_channels=16), build=resnet) as trainer:
        _, attention = trainer.state.unwrapped_model.module.blocks[2].conv2
        assert isinstance(attention.reduce, nn.Sequential)
        trainer.fit()


def test_wrong_arguments_are_refused(make_trainer, resnet):
    for latent in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"latent_channels={latent!r}"):
            SqueezeExcite(latent)
    with pytest.raises(ValueError, match="min_channels=0"):
        SqueezeExcite(min_channels=0)
    with pytest.raises(ValueError, match="SqueezeExcite found no Conv2d with 128 channels"):
        make_trainer(SqueezeExcite(), build=resnet)
    make_trainer(SqueezeExcite(allow_no_match=True), build=resnet).close()
