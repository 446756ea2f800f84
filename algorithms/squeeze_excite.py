"""Squeeze-and-excitation: each channel is scaled by a factor that depends on all channels of the image."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate, resolve_width
from runner.failures.checks import check_whole

Layer = Callable[[Tensor], Tensor]


def squeeze_excite(images: Tensor, reduce: Layer, expand: Layer) -> Tensor:
    """Return each channel times sigmoid(B(relu(A(m)))), with the channels' means m over the image.

    The means describe the image as a whole, and the factors in (0, 1) choose the channels that matter for it (Hu et al.
    2018).

    Args:
        images: images (N, C, H, W).
        reduce: function A, (N, C) -> (N, L).
        expand: function B, (N, L) -> (N, C).
    """
    scales = torch.sigmoid(expand(F.relu(reduce(images.mean(dim=(2, 3))))))
    return images * scales[:, :, None, None]


class _ChannelAttention(nn.Module):
    """`squeeze_excite` with its own weights.

    Args:
        channels: number of channels, C.
        latent: width of the hidden layer, L.
    """

    def __init__(self, channels: int, latent: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels, latent, bias=False)
        self.expand = nn.Linear(latent, channels, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scaled images, see `squeeze_excite`."""
        return squeeze_excite(images, self.reduce, self.expand)


class SqueezeExcite(Algorithm):
    """Adds channel attention after convolutions.

    A convolution becomes a sequence of itself and the attention, so that its weights, hooks and parametrizations stay.
    The new weights depend only on (seed, config key) and are the same on all ranks.

    Args:
        latent_channels: width of the attention's hidden layer; below 1, a fraction of the output channels.
        min_channels: smallest number of channels, both in and out, of a convolution to add attention to; at least 1.
        allow_no_match: whether to leave a model without such convolutions unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range; or, at INIT, the model has no such convolution.

    Evidence:
        Some, for image classification with many epochs, at a small cost in time (Hu et al. 2018,
        "Squeeze-and-Excitation Networks", arXiv:1709.01507, once per block). Less is known about attention after each
        convolution.
    """

    runs_before = ("Factorize", "WeightStandardization")

    def __init__(self, latent_channels: float = 64, min_channels: int = 128, allow_no_match: bool = False) -> None:
        resolve_width("latent_channels", latent_channels, 1)
        check_whole("min_channels", min_channels, 1)
        self.latent_channels = latent_channels
        self.min_channels = min_channels
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        target = f"Conv2d with {self.min_channels} channels in and out"
        operate(self, state, {nn.Conv2d: self._attend}, target, self.allow_no_match)

    def _attend(self, conv: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(conv, nn.Conv2d)
        if min(conv.in_channels, conv.out_channels) < self.min_channels:
            return None
        latent = resolve_width("latent_channels", self.latent_channels, conv.out_channels)
        return nn.Sequential(conv, _ChannelAttention(conv.out_channels, latent))
