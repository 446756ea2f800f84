"""Image operations for a whole batch on its device, with a separate strength for each image.

The operations are those of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501) and its successors, as Pillow and
torchvision define them. Images are floating point (N, C, H, W), from 0 (black) to 1 (white), and results stay in that
range. Strengths (N,) are on the same device and in [-1, 1], where 0 means no change, or the smallest one; for
operations with two directions the sign selects the direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SHEAR = 0.3  # pixels of shift per pixel of distance
MAX_TRANSLATION = 150 / 331  # fraction of the image's side
MAX_ROTATION = 30.0  # degrees
MAX_ENHANCEMENT = 0.9  # largest change of a factor, up or down from 1
POSTERIZED_BITS = 4  # largest number of bits dropped, of 8


@lru_cache(maxsize=256)
def _numbers(*values: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, copied to the device only once."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def transform(images: Tensor, matrices: Tensor) -> Tensor:
    """Return images after affine transforms with bilinear interpolation; pixels from outside the image are black.

    Args:
        images: images (N, C, H, W).
        matrices: matrices (N, 2, 3) that map an output pixel's (x, y, 1) to the input's (x, y), in pixels from the
            image's center, x to the right and y down.
    """
    height, width = images.shape[2:]
    half = _numbers(width / 2, height / 2, dtype=images.dtype, device=images.device)
    # grid_sample's coordinates run from -1 to 1 over the image, whatever its size.
    scale = torch.cat([half, half.new_ones(1)]) / half[:, None]
    grid = F.affine_grid(matrices * scale, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _matrices(strengths: Tensor, **entries: Tensor) -> Tensor:
    """Return identity matrices (N, 2, 3) with some entries replaced; `x_y` is the factor of y in x."""
    matrices = torch.eye(2, 3, dtype=strengths.dtype, device=strengths.device).repeat(len(strengths), 1, 1)
    for name, values in entries.items():
        row, column = name.split("_")
        matrices[:, "xy".index(row), "xy1".index(column)] = values
    return matrices


def shear_x(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with each row shifted sideways, at strength 1 by 0.3 pixels per row of distance from the center."""
    return transform(images, _matrices(strengths, x_y=strengths * MAX_SHEAR))


def shear_y(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with each column shifted up or down, as `shear_x` shifts rows."""
    return transform(images, _matrices(strengths, y_x=strengths * MAX_SHEAR))


def translate_x(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images moved to the right by strength * 45 % of their width, in whole pixels."""
    return transform(images, _matrices(strengths, x_1=-(strengths * MAX_TRANSLATION * images.shape[3]).trunc()))


def translate_y(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images moved down by strength * 45 % of their height, in whole pixels."""
    return transform(images, _matrices(strengths, y_1=-(strengths * MAX_TRANSLATION * images.shape[2]).trunc()))


def rotate(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images rotated clockwise by strength * 30 degrees."""
    angles = strengths * math.radians(MAX_ROTATION)
    cosine = angles.cos()
    sine = angles.sin()
    return transform(images, _matrices(strengths, x_x=cosine, x_y=sine, y_x=-sine, y_y=cosine))


def _blend(images: Tensor, others: Tensor, strengths: Tensor) -> Tensor:
    """Return images moved away from other images, or towards them, by a factor of 1 + 0.9 strength."""
    factors = (1 + MAX_ENHANCEMENT * strengths).view(-1, 1, 1, 1)
    return torch.lerp(others, images, factors).clamp(0, 1)


def _gray(images: Tensor) -> Tensor:
    """Return the luminance (N, 1, H, W): of three channels by ITU-R 601, otherwise the mean of the channels."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    weights = _numbers(0.299, 0.587, 0.114, dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


def brightness(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images made brighter or darker by a factor of 1 + 0.9 strength."""
    return _blend(images, torch.zeros_like(images), strengths)


def color(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with more or less color; gray images stay unchanged."""
    return _blend(images, _gray(images).expand_as(images), strengths)


def contrast(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with more or less contrast around their mean luminance."""
    return _blend(images, _gray(images).mean(dim=(2, 3), keepdim=True).expand_as(images), strengths)


def sharpness(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images made sharper or smoother; pixels at the edges stay unchanged."""
    if min(images.shape[2:]) < 3:
        return images
    channels = images.shape[1]
    kernel = images.new_ones(channels, 1, 3, 3)
    kernel[:, :, 1, 1] = 5
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel / 13, groups=channels)
    return _blend(images, smooth, strengths)


def posterize(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images that keep only the highest 8 - round(4 |strength|) of 8 bits."""
    steps = 2 ** (strengths.abs() * POSTERIZED_BITS).round().view(-1, 1, 1, 1)
    return ((images * 255).round() / steps).floor() * steps / 255


def solarize(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images in which values of at least 1 - |strength| are inverted."""
    return torch.where(images >= 1 - strengths.abs().view(-1, 1, 1, 1), 1 - images, images)


def autocontrast(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images whose channels each span [0, 1]; a constant channel stays unchanged. The strength is ignored."""
    low = images.amin(dim=(2, 3), keepdim=True)
    high = images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).where(high > low, 1), images)


def equalize(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images whose channels use all 256 levels about equally often. The strength is ignored."""
    levels = (images * 255).round().clamp(0, 255).long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    # As in Pillow, the brightest level that occurs does not count, and steps are whole numbers.
    brightest = counts.gather(2, levels.amax(dim=2, keepdim=True))
    steps = (levels.shape[2] - brightest) // 255
    table = ((counts.cumsum(2) - counts + steps // 2) // steps.clamp(min=1)).clamp(0, 255)
    equalized = table.gather(2, levels).to(images.dtype) / 255
    return torch.where((steps > 0)[..., None], equalized.view_as(images), images)


def identity(images: Tensor, strengths: Tensor) -> Tensor:
    """Return the images unchanged."""
    return images


Operation = Callable[[Tensor, Tensor], Tensor]

CORE: tuple[Operation, ...] = (
    autocontrast,
    equalize,
    posterize,
    rotate,
    solarize,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
)
"""The operations of AugMix, without those that the corruptions of ImageNet-C resemble."""

ALL: tuple[Operation, ...] = (identity, *CORE, color, contrast, brightness, sharpness)
"""The operations of RandAugment and TrivialAugment."""


def apply_each(
    images: Tensor, operations: Sequence[Operation], chosen: numpy.ndarray[Any, Any], strengths: numpy.ndarray[Any, Any]
) -> Tensor:
    """Return images after one operation each.

    Args:
        images: images (N, C, H, W).
        operations: operations to choose from.
        chosen: index (N,) of each image's operation; negative for none.
        strengths: strength (N,) of each image's operation, in [-1, 1].
    """
    order = numpy.argsort(chosen, kind="stable")  # groups the images by operation
    bounds = numpy.searchsorted(chosen[order], range(len(operations) + 1)).tolist()
    index = torch.from_numpy(order).to(images.device, non_blocking=True)
    ordered_strengths = torch.from_numpy(strengths[order]).to(images.device, images.dtype, non_blocking=True)
    ordered = images[index]
    changed = [ordered[: bounds[0]]]
    for operation, (start, end) in zip(operations, pairwise(bounds), strict=True):
        if end > start:
            changed.append(operation(ordered[start:end], ordered_strengths[start:end]))
    return torch.empty_like(images).index_copy_(0, index, torch.cat(changed))
