"""ResNet8, compared with the formulas of blocks and head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.models import BasicBlock, ResNet8


def batch_norm(x, norm):
    mean, var = x.mean(dim=(0, 2, 3), keepdim=True), x.var(dim=(0, 2, 3), keepdim=True, correction=0)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)


@pytest.mark.parametrize(("out_channels", "stride"), [(4, 1), (6, 1), (4, 2), (8, 2)])
def test_a_block_equals_the_formula(out_channels, stride):
    block = BasicBlock(4, out_channels, stride)
    x = torch.randn(3, 4, 7, 7)
    residual = batch_norm(F.conv2d(x, block.conv1.weight, stride=stride, padding=1), block.norm1).clamp(min=0)
    residual = batch_norm(F.conv2d(residual, block.conv2.weight, padding=1), block.norm2)
    shortcut = x
    if stride != 1 or out_channels != 4:
        assert isinstance(block.shortcut, nn.Sequential)
        convolution, norm = block.shortcut
        assert isinstance(convolution, nn.Conv2d)
        shortcut = batch_norm(F.conv2d(x, convolution.weight, stride=stride), norm)
    else:
        assert isinstance(block.shortcut, nn.Identity)
    torch.testing.assert_close(block(x), (residual + shortcut).clamp(min=0), atol=1e-5, rtol=1e-4)


def test_resnet8_has_78_thousand_weights_at_width_16():
    assert sum(weight.numel() for weight in ResNet8().parameters()) == 77_754


@pytest.mark.parametrize(("channels", "size", "classes", "width"), [(1, 8, 10, 16), (3, 33, 5, 4)])
def test_images_may_have_any_size(channels, size, classes, width):
    model = ResNet8(channels, classes, width)
    images = torch.randn(2, channels, size, size)
    features = model.blocks(model.stem(images))
    assert features.shape == (2, 4 * width, -(-size // 4), -(-size // 4))
    assert model(images).shape == (2, classes)


def test_the_head_is_linear_in_the_mean_over_positions():
    model = ResNet8(width=4).eval()
    images = torch.randn(2, 1, 8, 8)
    pooled = F.adaptive_avg_pool2d(model.blocks(model.stem(images)), 1).flatten(1)
    torch.testing.assert_close(model(images), F.linear(pooled, model.head.weight, model.head.bias))


@pytest.mark.parametrize("argument", [{"in_channels": 0}, {"num_classes": 0}, {"width": -2}], ids=str)
def test_wrong_arguments_are_refused(argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be a whole number, at least 1"):
        ResNet8(**argument)
