"""Squeeze-and-excitation: each channel is scaled by what all channels of the image are like."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner import Algorithm, Logger, State
from runner.algorithms._surgery import operate, resolve_width
from runner.checks import check_whole

Layer = Callable[[Tensor], Tensor]


def squeeze_excite(images: Tensor, reduce: Layer, expand: Layer) -> Tensor:
    """Return each channel times sigmoid(B(relu(A(m)))), of the channels' means m over the image.

    Args:
        images: (N, C, H, W).
        reduce: A, (N, C) -> (N, L).
        expand: B, (N, L) -> (N, C).

    Returns:
        (N, C, H, W).
    """
    scales = torch.sigmoid(expand(F.relu(reduce(images.mean(dim=(2, 3))))))
    return images * scales[:, :, None, None]


class _ChannelAttention(nn.Module):
    """`squeeze_excite` with weights of its own.

    Args:
        channels: C.
        latent: L.
    """

    def __init__(self, channels: int, latent: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels, latent, bias=False)
        self.expand = nn.Linear(latent, channels, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scaled images, see `squeeze_excite`."""
        return squeeze_excite(images, self.reduce, self.expand)


class SqueezeExcite(Algorithm):
    """Puts channel attention behind convolutions.

    A convolution becomes a sequence of itself and the attention, so that its weights, hooks and parametrizations stay.
    The new weights are drawn from (seed, config key) alone, equal on all ranks.

    Args:
        latent_channels: width of the attention's hidden layer; a fraction below 1 is one of the output channels.
        min_channels: channels that a convolution has at least, in its input as well as its output; at least 1.
        allow_no_match: leave a model without such convolutions as it is, rather than refuse it.

    Raises:
        ValueError: an argument is out of range; at INIT, the model has no such convolution.

    Evidence:
        Some, for image classification with many epochs, at a small cost in time (Hu et al. 2018,
        "Squeeze-and-Excitation Networks", arXiv:1709.01507, once a block); after each convolution: less is known.
    """

    runs_before = ("Factorize", "WeightStandardization")

    def __init__(self, latent_channels: float = 64, min_channels: int = 128, allow_no_match: bool = False) -> None:
        resolve_width("latent_channels", latent_channels, 1)
        check_whole("min_channels", min_channels, 1)
        self.latent_channels = latent_channels
        self.min_channels = min_channels
        self.allow_no_match = allow_no_match

    def init(self, state: State, logger: Logger) -> None:
        wanted = f"Conv2d with {self.min_channels} channels in and out"
        operate(self, state, {nn.Conv2d: self._attend}, wanted, self.allow_no_match)

    def _attend(self, conv: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(conv, nn.Conv2d)
        if min(conv.in_channels, conv.out_channels) < self.min_channels:
            return None
        latent = resolve_width("latent_channels", self.latent_channels, conv.out_channels)
        return nn.Sequential(conv, _ChannelAttention(conv.out_channels, latent))
