"""A residual network small enough for a CPU: 78,000 weights at width 16."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from runner.failures.checks import check_counts


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and a shortcut around them: `relu(norm(conv(relu(norm(conv(x))))) + x)`.

    If the shape changes, the shortcut is a 1x1 convolution with batch norm. Source: He et al. 2015,
    "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385.

    Args:
        in_channels: channels of the input `(N, in_channels, H, W)`.
        out_channels: channels of the output `(N, out_channels, H / stride, W / stride)`, sizes rounded up.
        stride: stride of the first convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output `(N, out_channels, H / stride, W / stride)`."""
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(residual))
        return F.relu(residual + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A stem, residual blocks, global average pooling and a linear layer, with the initial weights of He et al."""

    def __init__(self, stem: nn.Sequential, blocks: nn.Sequential, head: nn.Linear) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = blocks
        self.head = head
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits `(N, C)`."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))

    def flops_per_sample(self, shape: Sequence[int]) -> float:
        """Return the floating-point operations of the forward and backward pass for an image of shape `(C, H, W)`.

        They are six for each weight of a convolution and each pixel of its output, and six for each weight of the head:
        one multiplication and one addition, in the forward pass and twice in the backward pass. Biases, norms and
        activations are not counted.
        """
        height, width = shape[-2:]
        multiplied = _count_weights(self.head, 2)
        for part in (*self.stem, *self.blocks):
            first = part.conv1 if isinstance(part, BasicBlock) else part
            strides = getattr(first, "stride", 1)
            stride = strides if isinstance(strides, int) else strides[0]
            height = math.ceil(height / stride)
            width = math.ceil(width / stride)
            multiplied += _count_weights(part, 4) * height * width
        return 6.0 * multiplied


class ResNet8(ResidualNetwork):
    """A stem, three residual blocks of increasing width, global average pooling and a linear layer.

    Args:
        in_channels: channels of the images `(N, in_channels, H, W)`, of any size.
        num_classes: C of the logits `(N, C)`.
        width: channels of the stem and the first block; the others have two and four times that number.

    Raises:
        ValueError: an argument is below 1.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10, width: int = 16) -> None:
        check_counts(in_channels=in_channels, num_classes=num_classes, width=width)
        stem = nn.Sequential(nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = nn.Sequential(
            BasicBlock(width, width), BasicBlock(width, 2 * width, stride=2), BasicBlock(2 * width, 4 * width, stride=2)
        )
        super().__init__(stem, blocks, nn.Linear(4 * width, num_classes))


def _count_weights(module: nn.Module, dimensions: int) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.dim() == dimensions)
