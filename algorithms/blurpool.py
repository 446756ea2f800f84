"""BlurPool: a low-pass filter before downsampling, so that features shift with the input."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate
from runner.failures.checks import check_whole


def blur(images: Tensor, stride: int | tuple[int, int] = 1) -> Tensor:
    """Return images filtered by [1, 2, 1] / 4 down and across, keeping every `stride`-th pixel.

    Of a pattern that changes sign from pixel to pixel, every second pixel would look constant; the filter removes it,
    because 1 - 2 + 1 = 0 (Zhang 2019). Pixels at the edges are replicated outwards, so that a constant image stays
    unchanged.

    Args:
        images: floating-point images (N, C, H, W).
        stride: stride down and across, in pixels.

    Returns:
        Images (N, C, ceil(H / stride), ceil(W / stride)).
    """
    # [1, 2, 1] / 4 is [1, 1] / 2 applied twice; average pooling needs no weights, in any dtype and memory format.
    pairs = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), kernel_size=2, stride=1)
    return F.avg_pool2d(pairs, kernel_size=2, stride=stride)


class _Blur(nn.Module):
    """`blur` as a module.

    Args:
        stride: stride down and across, in pixels.
    """

    def __init__(self, stride: int | tuple[int, int] = 1) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        """Return the filtered images, see `blur`."""
        return blur(images, self.stride)

    def extra_repr(self) -> str:
        """Return the arguments, for printing."""
        return f"stride={self.stride}"


class BlurPool(Algorithm):
    """Adds a low-pass filter to strided convolutions and max pools, without changing any shape.

    A max pool takes its maxima at every pixel, and the filter then applies the stride. A layer becomes a sequence of
    itself and the filter, so that its weights, hooks and parametrizations stay. Nothing is random or depends on ranks
    or microbatches.

    Args:
        replace_convs: whether to filter at each `Conv2d` with a stride.
        replace_maxpools: whether to filter at each `MaxPool2d` with a stride, except those with `ceil_mode` or
            `return_indices`.
        blur_first: whether to filter the input of a convolution, which keeps its stride and its cost. Otherwise the
            convolution runs at every pixel, and its output is filtered; this is better, but costs stride squared times
            as much.
        min_channels: smallest number of input channels of a convolution to filter at; at least 1.
        allow_no_match: whether to leave a model without such layers unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range, or both kinds of layers are switched off; or, at INIT, the model has no
            such layer.

    Evidence:
        Some: more accurate and more stable under shifts for ResNets on ImageNet (Zhang 2019, "Making Convolutional
        Networks Shift-Invariant Again", arXiv:1904.11486); none for images of a few pixels.
    """

    runs_before = ("SqueezeExcite", "Factorize", "WeightStandardization")

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
        allow_no_match: bool = False,
    ) -> None:
        if not (replace_convs or replace_maxpools):
            raise ValueError("replace_convs=False and replace_maxpools=False: one of them must be True")
        check_whole("min_channels", min_channels, 1)
        self.replace_convs = replace_convs
        self.replace_maxpools = replace_maxpools
        self.blur_first = blur_first
        self.min_channels = min_channels
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        policies = {}
        if self.replace_convs:
            policies[nn.Conv2d] = self._blur_conv
        if self.replace_maxpools:
            policies[nn.MaxPool2d] = self._blur_maxpool
        target = f"strided Conv2d with at least {self.min_channels} input channels and no strided MaxPool2d"
        operate(self, state, policies, target, self.allow_no_match)

    def _blur_conv(self, conv: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(conv, nn.Conv2d)
        if max(conv.stride) == 1 or conv.in_channels < self.min_channels:
            return None
        if self.blur_first:
            return nn.Sequential(_Blur(), conv)
        stride = conv.stride
        conv.stride = (1, 1)
        return nn.Sequential(conv, _Blur(stride))  # type: ignore[arg-type]

    def _blur_maxpool(self, pool: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(pool, nn.MaxPool2d)
        stride = pool.stride if isinstance(pool.stride, tuple) else (pool.stride, pool.stride)
        if max(stride) == 1 or pool.ceil_mode or pool.return_indices:
            return None
        pool.stride = 1
        return nn.Sequential(pool, _Blur(stride))
