from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner import ClassificationModel, LanguageModel
from runner.algorithms import Factorize
from runner.algorithms.factorize import factorize, factorize_conv, factorize_linear
from runner.models import GPT


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
@pytest.mark.parametrize("rank", [1, 3, 5, 9])
def test_the_product_is_the_closest_matrix_of_its_rank(shape: tuple[int, int], rank: int):
    matrix = torch.randn(shape, dtype=torch.float64)
    b, a = factorize(matrix, rank)
    assert b.shape == (shape[0], min(rank, 5))
    assert a.shape == (min(rank, 5), shape[1])
    # By the theorem of Eckart and Young, the error consists of the dropped singular values.
    error = torch.linalg.svdvals(matrix)[rank:].square().sum().sqrt()
    torch.testing.assert_close(torch.linalg.matrix_norm(matrix - b @ a), error)


def test_bfloat16_weights_are_factorized_in_float32():
    matrix = torch.randn(6, 6)
    b, a = factorize(matrix.bfloat16(), 6)
    assert b.dtype == a.dtype == torch.bfloat16
    torch.testing.assert_close(b.float() @ a.float(), matrix, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2, "padding_mode": "circular"}]
)
def test_a_convolution_factorized_at_full_rank_computes_the_same(bias: bool, options: dict):
    conv = nn.Conv2d(4, 6, 3, bias=bias, **options).double()
    images = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(factorize_conv(conv, 6)(images), conv(images))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_factorized_at_full_rank_computes_the_same(bias: bool):
    linear = nn.Linear(4, 6, bias=bias).double()
    inputs = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(factorize_linear(linear, 4)(inputs), linear(inputs))


def test_frozen_weights_stay_frozen_and_the_bias_is_reused():
    linear = nn.Linear(4, 4)
    linear.weight.requires_grad_(False)
    layers = factorize_linear(linear, 2)
    assert [parameter.requires_grad for parameter in layers.parameters()] == [False, False, True]
    assert layers[1].bias is linear.bias


def ranks(model: nn.Module) -> dict[str, int]:
    """Return the rank of each factorized layer by its name."""
    pairs: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Sequential) and len(module) == 2
    }
    return {name: len(pair[0].weight) for name, pair in pairs.items() if hasattr(pair[1], "weight")}


@pytest.mark.parametrize(("latent", "rank"), [(0.25, 5), (3, 3)])
@pytest.mark.parametrize("chosen", ["convs", "linears", "both"])
def test_layers_above_the_limits_are_factorized(make_trainer, latent: float, rank: int, chosen: str):
    layers = nn.Conv2d(20, 30, 3), nn.Conv2d(19, 30, 3), nn.Conv2d(20, 40, 3, groups=2), nn.Linear(20, 30), nn.ReLU()
    model = ClassificationModel(nn.Sequential(*layers, nn.Linear(19, 30)).double(), 3)
    algorithm = Factorize(chosen != "linears", chosen != "convs", 20, latent, 20, latent)
    with make_trainer(algorithm, model=model) as trainer:
        expected = {"convs": {"module.0": rank}, "linears": {"module.3": rank}}
        both = {**expected["convs"], **expected["linears"]}
        assert ranks(trainer.state.unwrapped_model) == expected.get(chosen, both)


def test_layers_that_would_not_get_smaller_stay_unchanged(make_trainer):
    model = ClassificationModel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16)).double(), 3)
    with make_trainer(Factorize(min_features=8, latent_features=4), model=model):
        assert ranks(model) == {"module.1": 4}


def test_a_head_that_is_tied_to_the_embedding_stays_tied(make_trainer):
    gpt = GPT(vocab_size=32, context=8, d_model=16, n_layers=1, n_heads=2)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with make_trainer(
        Factorize(min_features=16, latent_features=4),
        model=LanguageModel(gpt),
        train_dataloader=[(tokens, tokens)],
        eval_dataloader=None,
        max_duration="1ba",
    ) as trainer:
        assert gpt.head.weight is gpt.token_embedding.weight
        assert len(ranks(gpt)) == 4
        trainer.fit()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"factorize_convs": False, "factorize_linears": False}, "factorize_convs=False"),
        ({"min_channels": 0}, "min_channels=0"),
        ({"min_features": 0.5}, "min_features=0.5"),
        ({"latent_channels": 0}, "latent_channels=0"),
        ({"latent_features": 1.5}, "latent_features=1.5"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        Factorize(**arguments)
