"""The residual network with 18 layers, for small images or for those of ImageNet's size."""

from __future__ import annotations

from torch import nn

from runner.failures.checks import check_counts
from runner.models.resnet8 import BasicBlock, ResidualNetwork

WIDTHS = (64, 128, 256, 512)  # channels of the four stages, two blocks each


class ResNet18(ResidualNetwork):
    """A stem, eight residual blocks in four stages, global average pooling and a linear layer: 11 million weights.

    Source: He et al. 2015, "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385; with
    `small_images` the stem is the usual one for CIFAR, because the original one reduces 32 x 32 pixels to 8 x 8.

    Args:
        in_channels: channels of the images `(N, in_channels, H, W)`, of any size.
        num_classes: C of the logits `(N, C)`.
        small_images: whether the stem is a 3x3 convolution that keeps the size; otherwise it is a 7x7 convolution of
            stride 2 and max pooling, which together divide height and width by 4.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, small_images: bool = True) -> None:
        check_counts(in_channels=in_channels, num_classes=num_classes)
        kernel, stride = (3, 1) if small_images else (7, 2)
        stem: list[nn.Module] = [
            nn.Conv2d(in_channels, WIDTHS[0], kernel, stride=stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(WIDTHS[0]),
            nn.ReLU(),
        ]
        if not small_images:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        blocks: list[nn.Module] = []
        for previous, width in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False):
            blocks += [BasicBlock(previous, width, stride=1 if previous == width else 2), BasicBlock(width, width)]
        super().__init__(nn.Sequential(*stem), nn.Sequential(*blocks), nn.Linear(WIDTHS[-1], num_classes))
