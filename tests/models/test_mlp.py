"""MLP, compared with its formula."""

import pytest
import torch
from torch import nn

from runner.models import MLP


def test_mlp_is_linear_layers_with_relu_between_them():
    model = MLP(in_features=12, hidden=[8, 5], num_classes=3)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linears] == [(12, 8), (8, 5), (5, 3)]
    x = torch.randn(4, 3, 2, 2)
    expected = x.reshape(4, 12)
    for layer in linears[:-1]:
        expected = (expected @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(model(x), expected @ linears[-1].weight.T + linears[-1].bias)


def test_mlp_without_hidden_layers_is_linear():
    model = MLP(6, [], 2)
    x, y = torch.randn(2, 3, 6)
    torch.testing.assert_close(model(x) + model(y), model(x + y) + model(torch.zeros(3, 6)))


def test_dropout_acts_only_in_training_mode():
    model = MLP(10, [64], 2, dropout=0.5)
    x = torch.randn(3, 10)
    assert not torch.equal(model(x), model(x))
    model.eval()
    torch.testing.assert_close(model(x), model(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": [4, 0]}, r"hidden=\[4, 0\].*at least 1"),
        ({"in_features": 0}, "in_features=0.*at least 1"),
        ({"dropout": 1.0}, "dropout=1.0: must be a probability, at least 0 and below 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLP(**({"in_features": 4, "hidden": [4], "num_classes": 2} | arguments))


def test_flops_per_sample_are_six_per_weight_of_a_matrix():
    assert MLP(64, [128], 10).flops_per_sample((8, 8)) == 6 * (64 * 128 + 128 * 10)
