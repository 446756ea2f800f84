"""Shows samples as images with captions and as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runner.device.batch import tensors
from runner.pictures.figure import make_figure, render, shorten, style

COLUMNS = 4  # pictures in a row
CAPTION = 26  # characters in a line of a caption
TEXT = 160  # characters of a text


def are_images(values: Tensor, channels_last: bool = False) -> bool:
    """Return whether a tensor holds images (N, C, H, W), or (N, H, W, C), with one or three channels."""
    return values.ndim == 4 and values.shape[-1 if channels_last else 1] in (1, 3)


def find_images(batch: Any) -> Tensor | None:
    """Return the first tensor of images (N, C, H, W) in a batch, or None."""
    return next((values for values in tensors(batch) if are_images(values)), None)


def to_pictures(images: Tensor, channels_last: bool = False) -> npt.NDArray[np.uint8]:
    """Return images as uint8 (N, H, W, C), each stretched to the full range from its smallest to its largest value.

    If the images are uint8, or all their values are in [0, 1], brightness is kept. Images on a device are read back.
    """
    images = images.detach().cpu()
    images = images if channels_last else images.permute(0, 2, 3, 1)
    if images.dtype == torch.uint8:
        return images.numpy()
    images = torch.nan_to_num(images.float(), nan=0.0, posinf=0.0, neginf=0.0)
    low = images.amin(dim=(1, 2, 3), keepdim=True)
    high = images.amax(dim=(1, 2, 3), keepdim=True)
    if low.min() < 0.0 or high.max() > 1.0:
        images = (images - low) / torch.where(high > low, high - low, 1.0)
    return (255 * images).round().to(torch.uint8).numpy()


def to_classes(values: Any, count: int) -> Tensor | None:
    """Return the classes of the first N samples of a batch, numbers (N,) or masks (N, H, W); None for other values.

    Args:
        values: values of the batch: numbers (B,) or (B, 1), masks (B, H, W) or (B, 1, H, W), floating-point scores of
            C > 1 classes (B, C) or (B, C, H, W), or floating-point scores of one class (B, 1, H, W).
        count: N, at most B.
    """
    if not isinstance(values, Tensor) or values.ndim not in (1, 2, 3, 4) or len(values) < count:
        return None
    values = values[:count].detach()
    if values.ndim in (2, 4):
        if values.shape[1] == 1:
            values = values.squeeze(1)
            return (values > 0).long() if values.ndim == 3 and values.is_floating_point() else values
        return values.argmax(dim=1) if values.is_floating_point() else None
    return values


def make_captions(
    columns: Mapping[str, Any], samples: Sequence[int | None] | None = None, names: Sequence[str] | None = None
) -> list[str]:
    """Return captions such as 'sample 3: loss 2.603, target 2, prediction 6'; [] if there is nothing to show.

    Args:
        columns: lists or tensors (N,) of numbers, by name. None and tensors of other shapes are skipped.
        samples: indices of the N samples, with None for unknown ones.
        names: names of classes, which replace whole numbers below their number.
    """
    texts = []
    for name, values in columns.items():
        numbers = values.tolist() if isinstance(values, Tensor) else values or []
        if numbers and not isinstance(numbers[0], list):
            texts.append([f"{name} {_short(number, names or ())}" for number in numbers])
    captions = [", ".join(parts) for parts in zip(*texts, strict=True)]
    if samples is None:
        return captions
    names = [f"sample {'?' if index is None else index}" for index in samples]
    return [f"{name}: {text}" for name, text in zip(names, captions, strict=True)] if captions else names


def show_text(inputs: Tensor | None, index: int, decode: Callable[[list[int]], str] | None = None) -> str:
    """Return the sample at `index` of tokens (N, T) as text, or '' if `inputs` are not tokens.

    Without `decode`, tokens are shown as bytes if all are below 256, and otherwise as numbers.
    """
    if inputs is None or inputs.ndim != 2 or inputs.is_floating_point():
        return ""
    tokens = inputs[index].tolist()
    if decode is not None:
        text = decode(tokens)
    elif all(0 <= token < 256 for token in inputs.flatten().tolist()):
        text = bytes(tokens).decode(errors="replace")
    else:
        text = " ".join(map(str, tokens))
    return shorten(" ".join(text.split()), TEXT)


def draw_images(images: Tensor, captions: Sequence[str], title: str, kind: str) -> bytes:
    """Return a picture of all images with their captions, as the content of a file.

    Args:
        images: images (N, C, H, W) with one or three channels, N at least 1.
        captions: captions of the N images.
        title: the title of the picture.
        kind: 'png', 'svg' or 'pdf'.
    """
    rows = math.ceil(len(images) / COLUMNS)
    with style():
        figure = make_figure(7.0, 0.4 + 2.0 * rows)
        figure.suptitle(shorten(title, 80), fontsize="medium")
        for position, (picture, caption) in enumerate(zip(to_pictures(images), captions, strict=True), start=1):
            axes = figure.add_subplot(rows, COLUMNS, position)
            axes.set_axis_off()
            axes.set_title(textwrap.fill(caption, CAPTION), fontsize="x-small")
            pixels = picture[..., 0] if picture.shape[-1] == 1 else picture
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    return render(figure, kind)


def _short(value: float, names: Sequence[str]) -> str:
    """Return a float with four digits, or an integer in full or as the name of its class."""
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return f"{value:.4g}" if isinstance(value, float) else f"{value:d}"
