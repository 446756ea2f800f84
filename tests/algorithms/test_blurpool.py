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


def apply_blurpool(make_trainer, layer: nn.Module, **arguments) -> nn.Module:
    """Return the layer that BlurPool puts in place of a layer."""
    model = ClassificationModel(nn.Sequential(layer.double(), nn.Linear(1, 1).double()), 3)
    with make_trainer(BlurPool(**{"min_channels": 2, **arguments}), model=model, max_duration="1ba") as trainer:
        return trainer.state.unwrapped_model.module[0]  # type: ignore[index, return-value]


@pytest.mark.parametrize("options", [{"kernel_size": 3}, {"kernel_size": 1}, {"kernel_size": 5, "padding": 2}])
@pytest.mark.parametrize("stride", [2, 3, (1, 2)])
def test_strided_convolutions_get_a_blur_before_or_after(make_trainer, options: dict, stride: int | tuple[int, int]):
    images = [torch.randn(2, 2, size, size, dtype=torch.float64) for size in (7, 8)]
    padding = options.get("padding", 0)

    conv = nn.Conv2d(2, 4, stride=stride, **options).double()  # type: ignore[arg-type]
    shapes = [conv(batch).shape for batch in images]
    blurred_after = apply_blurpool(make_trainer, conv, blur_first=False)
    for batch, shape in zip(images, shapes, strict=True):
        unstrided = F.conv2d(batch, conv.weight, conv.bias, padding=padding)
        torch.testing.assert_close(blurred_after(batch), blur(unstrided, stride))
        assert blurred_after(batch).shape == shape

    conv = nn.Conv2d(2, 4, stride=stride, **options).double()  # type: ignore[arg-type]
    blurred_before = apply_blurpool(make_trainer, conv)
    assert {*blurred_before.parameters()} == {conv.weight, conv.bias}
    for batch in images:
        expected = F.conv2d(blur(batch), conv.weight, conv.bias, stride=stride, padding=padding)
        torch.testing.assert_close(blurred_before(batch), expected)


@pytest.mark.parametrize(
    "options", [{"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": 2}, {"kernel_size": 2, "dilation": 2}]
)
def test_strided_max_pools_get_a_blur_with_their_stride(make_trainer, options: dict):
    blurred = apply_blurpool(make_trainer, nn.MaxPool2d(**options))
    for size in (7, 8):
        images = torch.randn(2, 2, size, size, dtype=torch.float64)
        unstrided = F.max_pool2d(images, **{**options, "stride": 1})
        torch.testing.assert_close(blurred(images), blur(unstrided, options.get("stride", 2)))
        assert blurred(images).shape == nn.MaxPool2d(**options)(images).shape


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
        apply_blurpool(make_trainer, layer, **arguments)
    assert apply_blurpool(make_trainer, layer, allow_no_match=True, **arguments) is layer


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"min_channels": 0}, "min_channels=0"),
        ({"min_channels": 1.5}, "min_channels=1.5"),
        ({"replace_convs": False, "replace_maxpools": False}, "replace_convs=False"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        BlurPool(**arguments)
