"""The residual network of 18 layers, for small images or for those of ImageNet's size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from runner.failures.checks import check_counts
from runner.models.resnet8 import BasicBlock, flops_of_residual_network

WIDTHS = (64, 128, 256, 512)  # channels of the four stages, two blocks each


class ResNet18(nn.Module):
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
        super().__init__()
        check_counts(in_channels=in_channels, num_classes=num_classes)
        kernel, stride = (3, 1) if small_images else (7, 2)
        stem: list[nn.Module] = [
            nn.Conv2d(in_channels, WIDTHS[0], kernel, stride=stride, padding=kernel // 2, bias=False),
            nn.BatchNorm2d(WIDTHS[0]),
            nn.ReLU(),
        ]
        if not small_images:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)
        blocks: list[nn.Module] = []
        for previous, width in zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False):
            blocks += [BasicBlock(previous, width, stride=1 if previous == width else 2), BasicBlock(width, width)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTHS[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `(N, C)`."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

    def flops_per_sample(self, shape: Sequence[int]) -> float:
        """Return the floating-point operations of the forward and backward pass for an image of shape `(C, H, W)`."""
        return flops_of_residual_network(self.stem, self.blocks, self.head, shape)
