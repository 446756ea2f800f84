from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from runner import ClassificationModel
from runner.algorithms import WeightStandardization
from runner.algorithms.weight_standardization import standardize


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3, 3, 3), (2, 1, 2, 2, 2)])
def test_each_output_channel_is_standardized(shape: tuple[int, ...]):
    weight = torch.randn(shape, dtype=torch.float64) * 3 + 1
    expected = F.batch_norm(weight.flatten(1).T, None, None, training=True, eps=1e-10).T.view(shape)
    torch.testing.assert_close(standardize(weight), expected)


def test_scale_and_shift_of_weights_are_removed():
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(standardize(3 * weight + 2), standardize(weight))


def net() -> ClassificationModel:
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4, 3)
    return ClassificationModel(nn.Sequential(*layers).double(), 3)


@pytest.mark.parametrize("ignored", [0, 1, 2])
def test_all_convolutions_but_the_last_are_standardized(make_trainer, ignored: int):
    model = net()
    first = model.module[0].weight.detach().clone()  # type: ignore[index]
    with make_trainer(WeightStandardization(ignored), model=model) as trainer:
        convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        assert [parametrize.is_parametrized(conv) for conv in convs] == [True, False, ignored == 0]
        torch.testing.assert_close(convs[0].weight, standardize(first))
        trainer.fit()
        assert not torch.allclose(convs[0].weight, standardize(first))
        images = torch.randn(1, 2, 4, 4, dtype=torch.float64)
        own: Any = dict(model.named_parameters())["module.0.parametrizations.weight.original"]
        torch.testing.assert_close(convs[0].eval()(images), F.conv2d(images, standardize(own), convs[0].bias))


def test_an_existing_optimizer_keeps_the_weights(make_trainer):
    model = net()
    before = model.module[0].weight  # type: ignore[index]
    with make_trainer(
        WeightStandardization(), model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1)
    ) as trainer:
        assert before in {*model.parameters()}
        trainer.fit()


def test_wrong_arguments_are_refused(make_trainer, resnet):
    with pytest.raises(ValueError, match="n_last_layers_ignore=-1"):
        WeightStandardization(-1)
    with pytest.raises(ValueError, match="found no convolution before the last n_last_layers_ignore=0"):
        make_trainer(WeightStandardization())
    with pytest.raises(ValueError, match="found no convolution before the last n_last_layers_ignore=99"):
        make_trainer(WeightStandardization(99), build=resnet)
    make_trainer(WeightStandardization(allow_no_match=True)).close()
