from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.ndimage import correlate
from torch import nn

from runner import ClassificationModel
from runner.algorithms import BlurPool
from runner.algorithms.blurpool import blur


@pytest.mark.parametrize("size", [(6, 7), (5, 2), (1, 1)])
@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
def test_blur_is_the_binomial_filter(size: tuple[int, int], stride: int | tuple[int, int]):
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    kernel = np.outer([1, 2, 1], [1, 2, 1])[None, None] / 16
    down, across = (stride, stride) if isinstance(stride, int) else stride
    expected = correlate(images.numpy(), kernel, mode="nearest")[..., ::down, ::across]
    torch.testing.assert_close(blur(images, stride), torch.from_numpy(expected.copy()))


def test_a_constant_image_stays_unchanged():
    assert torch.equal(blur(torch.full((1, 1, 5, 5), 3.0), 2), torch.full((1, 1, 3, 3), 3.0))


def operated(make_trainer, net: nn.Module, **arguments) -> nn.Module:
    model = ClassificationModel(nn.Sequential(net.double(), nn.Linear(1, 1).double()), 3)
    with make_trainer(BlurPool(**{"min_channels": 2, **arguments}), model=model, max_duration="1ba") as trainer:
        return trainer.state.unwrapped_model.module[0]  # type: ignore[index, return-value]


@pytest.mark.parametrize("options", [{"kernel_size": 3}, {"kernel_size": 1}, {"kernel_size": 5, "padding": 2}])
@pytest.mark.parametrize("stride", [2, 3, (1, 2)])
@pytest.mark.parametrize("size", [7, 8])
def test_strided_convolutions_get_a_blur_before_or_after(
    make_trainer, options: dict, stride: int | tuple[int, int], size: int
):
    conv = nn.Conv2d(2, 4, stride=stride, **options).double()  # type: ignore[arg-type]
    images = torch.randn(2, 2, size, size, dtype=torch.float64)
    weight, bias, padding = conv.weight, conv.bias, options.get("padding", 0)
    plain = conv(images)

    after = operated(make_trainer, conv, blur_first=False)
    everywhere = F.conv2d(images, weight, bias, padding=padding)
    torch.testing.assert_close(after(images), blur(everywhere, stride))
    assert after(images).shape == plain.shape

    conv = nn.Conv2d(2, 4, stride=stride, **options).double()  # type: ignore[arg-type]
    first = operated(make_trainer, conv)
    expected = F.conv2d(blur(images), conv.weight, conv.bias, stride=stride, padding=padding)
    torch.testing.assert_close(first(images), expected)
    assert {*first.parameters()} == {conv.weight, conv.bias}


@pytest.mark.parametrize(
    "options", [{"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 2}, {"kernel_size": 2, "dilation": 2}]
)
@pytest.mark.parametrize("size", [7, 8])
def test_strided_max_pools_get_a_blur_with_their_stride(make_trainer, options: dict, size: int):
    images = torch.randn(2, 2, size, size, dtype=torch.float64)
    plain = nn.MaxPool2d(**options)(images)
    blurred = operated(make_trainer, nn.MaxPool2d(**options))(images)
    everywhere = F.max_pool2d(images, **{**options, "stride": 1})
    torch.testing.assert_close(blurred, blur(everywhere, options.get("stride", 2)))
    assert blurred.shape == plain.shape


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (nn.Conv2d(2, 4, 3), {}),
        (nn.Conv2d(2, 4, 3, stride=2), {"min_channels": 3}),
        (nn.Conv2d(2, 4, 3, stride=2), {"replace_convs": False}),
        (nn.MaxPool2d(2), {"replace_maxpools": False}),
        (nn.MaxPool2d(2, stride=1), {}),
        (nn.MaxPool2d(2, ceil_mode=True), {}),
        (nn.MaxPool2d(2, return_indices=True), {}),
    ],
)
def test_other_layers_stay_unchanged(make_trainer, layer: nn.Module, arguments: dict):
    with pytest.raises(ValueError, match="allow_no_match=False: BlurPool found no strided Conv2d"):
        operated(make_trainer, layer, **arguments)
    assert operated(make_trainer, layer, allow_no_match=True, **arguments) is layer


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"min_channels": 0}, "min_channels=0"),
        ({"min_channels": 1.5}, "min_channels=1.5"),
        ({"replace_convs": False, "replace_maxpools": False}, "replace_convs=False"),
    ],
)
def test_arguments_are_checked(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        BlurPool(**arguments)
