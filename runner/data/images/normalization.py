"""The normalization of images, which loaders declare, so that algorithms can undo it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from runner.failures.checks import refuse_if

PerChannel = float | Sequence[float]
"""One number for all channels, or one per channel."""


class Normalization:
    """The transform of a loader that turns 8-bit images into (x / 255 - mean) / std, float32.

    The values are those of `ToDtype(torch.float32, scale=True)` and `Normalize(mean, std)` in
    `torchvision.transforms.v2`, bit for bit.

    Args:
        mean: mean of the images in [0, 1].
        std: their standard deviation, above 0.

    Raises:
        ValueError: a standard deviation is not above 0.
    """

    def __init__(self, mean: PerChannel, std: PerChannel) -> None:
        self.mean = per_channel(mean)
        self.std = per_channel(std)
        refuse_if(not min(self.std) > 0, "std", std, "must be a number above 0, or one per channel")

    @property
    def normalization(self) -> Normalization:
        """This object itself: a loader copies this attribute of its transform."""
        return self

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a batch with its images, uint8 `(N, C, H, W)`, normalized, and other tensors unchanged."""
        return tuple(self.apply(part) if part.dtype == torch.uint8 and part.ndim == 4 else part for part in batch)

    def apply(self, images: Tensor) -> Tensor:
        """Return normalized images, float32; the argument is uint8 `(..., C, H, W)`."""
        mean, std = self.tensors(images.device, torch.float32)
        return images.to(torch.float32).mul_(1 / 255).sub_(mean).div_(std)

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation, `(C, 1, 1)` or `(1, 1, 1)` each."""
        return _tensors(self.mean, self.std, device, dtype)


def per_channel(values: PerChannel) -> tuple[float, ...]:
    """Return numbers per channel as a tuple, of length 1 for one number."""
    return tuple(map(float, numpy.atleast_1d(values)))


@functools.cache  # once per device: a copy for each batch would wait for the device
def _tensors(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    first, second = (torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1) for values in (mean, std))
    return first, second


IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Statistics of ImageNet: red, green and blue."""
UNCHANGED = Normalization(mean=0.0, std=1.0)
"""What a loader declares if its images are in [0, 1]."""
