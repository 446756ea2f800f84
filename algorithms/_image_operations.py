"""Operations on images of which each has its own strength, for a whole batch at once and on its device.

They are those of AutoAugment (Cubuk et al. 2019, arXiv:1805.09501) and its followers, as Pillow and torchvision define
them. Images are floating point (N, C, H, W), black 0 and white 1; strengths (N,) on the same device lie in [-1, 1],
where 0 is no change or the least, and the sign chooses the direction where there are two. Results stay in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SHEAR = 0.3  # pixels sidewards per pixel
MAX_TRANSLATION = 150 / 331  # of the image's side
MAX_ROTATION = 30.0  # degrees
MAX_ENHANCEMENT = 0.9  # of a factor, up or down from 1
POSTERIZED_BITS = 4  # fewest bits that are left of 8


def _numbers(values: list[float], images: Tensor) -> Tensor:
    """Return numbers in the images' type on their device, which is not waited for as by `new_tensor`."""
    return torch.tensor(values, dtype=images.dtype).to(images.device, non_blocking=True)


def transform(images: Tensor, matrices: Tensor) -> Tensor:
    """Return images mapped by affine transforms, bilinear; black moves in at the edges.

    Args:
        images: (N, C, H, W).
        matrices: (N, 2, 3), from an output pixel's (x, y, 1) to the input's (x, y), in pixels from the image's center,
            x to the right and y down.
    """
    height, width = images.shape[2:]
    half = _numbers([width / 2, height / 2], images)
    # grid_sample counts from -1 to 1 over the image, whatever its size.
    scale = torch.cat([half, half.new_ones(1)]) / half[:, None]
    grid = F.affine_grid(matrices * scale, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _matrices(strengths: Tensor, **entries: Tensor) -> Tensor:
    """Return identities (N, 2, 3) in which some entries, named like `x_y` (the share of y in x), are others."""
    matrices = torch.eye(2, 3, dtype=strengths.dtype, device=strengths.device).repeat(len(strengths), 1, 1)
    for name, values in entries.items():
        into, source = name.split("_")
        matrices[:, "xy".index(into), "xy1".index(source)] = values
    return matrices


def shear_x(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images whose rows move sidewards, the more the further from the center; strength 1 is 0.3 pixels each."""
    return transform(images, _matrices(strengths, x_y=strengths * MAX_SHEAR))


def shear_y(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images whose columns move up and down, see `shear_x`."""
    return transform(images, _matrices(strengths, y_x=strengths * MAX_SHEAR))


def translate_x(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images moved to the right by strength * 45 % of their width, in whole pixels."""
    return transform(images, _matrices(strengths, x_1=-(strengths * MAX_TRANSLATION * images.shape[3]).trunc()))


def translate_y(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images moved down by strength * 45 % of their height, in whole pixels."""
    return transform(images, _matrices(strengths, y_1=-(strengths * MAX_TRANSLATION * images.shape[2]).trunc()))


def rotate(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images turned clockwise by strength * 30 degrees."""
    angles = strengths * math.radians(MAX_ROTATION)
    cosine, sine = angles.cos(), angles.sin()
    return transform(images, _matrices(strengths, x_x=cosine, x_y=sine, y_x=-sine, y_y=cosine))


def _blend(images: Tensor, others: Tensor, strengths: Tensor) -> Tensor:
    """Return images moved away from others by a factor of 1 + 0.9 strength, or towards them."""
    factors = (1 + MAX_ENHANCEMENT * strengths).view(-1, 1, 1, 1)
    return torch.lerp(others, images, factors).clamp(0, 1)


def _gray(images: Tensor) -> Tensor:
    """Return the luminance (N, 1, H, W): of three channels as ITU-R 601 has it, otherwise their mean."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    weights = _numbers([0.299, 0.587, 0.114], images).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


def brightness(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images brighter, or darker, by a factor of 1 + 0.9 strength."""
    return _blend(images, torch.zeros_like(images), strengths)


def color(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with more color, or less; gray ones stay as they are."""
    return _blend(images, _gray(images).expand_as(images), strengths)


def contrast(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with more contrast around their mean luminance, or less."""
    return _blend(images, _gray(images).mean(dim=(2, 3), keepdim=True).expand_as(images), strengths)


def sharpness(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images sharper, or smoother; pixels at the edge stay as they are."""
    if min(images.shape[2:]) < 3:
        return images
    channels = images.shape[1]
    kernel = images.new_ones(channels, 1, 3, 3)
    kernel[:, :, 1, 1] = 5
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel / 13, groups=channels)
    return _blend(images, smooth, strengths)


def posterize(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images with the highest 8 - round(4 |strength|) bits of 8 only."""
    steps = 2 ** (strengths.abs() * POSTERIZED_BITS).round().view(-1, 1, 1, 1)
    return ((images * 255).round() / steps).floor() * steps / 255


def solarize(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images in which what is at least as bright as 1 - |strength| is inverted."""
    return torch.where(images >= 1 - strengths.abs().view(-1, 1, 1, 1), 1 - images, images)


def autocontrast(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images whose channels each reach from 0 to 1; one that is all alike stays as it is. No strength."""
    low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).where(high > low, 1), images)


def equalize(images: Tensor, strengths: Tensor) -> Tensor:
    """Return images in whose channels all of 256 levels are about as frequent. No strength."""
    levels = (images * 255).round().clamp(0, 255).long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    # As Pillow: the brightest level there is does not count, and steps are whole numbers.
    brightest = counts.gather(2, levels.amax(dim=2, keepdim=True))
    steps = (levels.shape[2] - brightest) // 255
    table = ((counts.cumsum(2) - counts + steps // 2) // steps.clamp(min=1)).clamp(0, 255)
    equalized = table.gather(2, levels).to(images.dtype) / 255
    return torch.where((steps > 0)[..., None], equalized.view_as(images), images)


def identity(images: Tensor, strengths: Tensor) -> Tensor:
    """Return the images."""
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
"""Those of AugMix, which leaves out what ImageNet-C tests."""

ALL: tuple[Operation, ...] = (identity, *CORE, color, contrast, brightness, sharpness)
"""Those of RandAugment and TrivialAugment."""


def apply_each(
    images: Tensor, operations: Sequence[Operation], chosen: numpy.ndarray[Any, Any], strengths: numpy.ndarray[Any, Any]
) -> Tensor:
    """Return each image after its own operation.

    Args:
        images: (N, C, H, W).
        operations: to choose from.
        chosen: each image's, as an index (N,); negative for none.
        strengths: (N,), in [-1, 1].
    """
    changed = images.clone()
    for number, operation in enumerate(operations):
        index = numpy.flatnonzero(chosen == number)
        if len(index) and operation is not identity:
            samples = torch.from_numpy(index).to(images.device, non_blocking=True)
            these = torch.from_numpy(strengths[index]).to(images.device, images.dtype, non_blocking=True)
            changed[samples] = operation(images[samples], these)
    return changed
