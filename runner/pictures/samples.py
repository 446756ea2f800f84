"""Shows samples to people: images with captions, and texts of tokens."""

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
    """Return whether a tensor holds images (N, C, H, W), or (N, H, W, C), with one channel or three."""
    return values.ndim == 4 and values.shape[-1 if channels_last else 1] in (1, 3)


def find_images(batch: Any) -> Tensor | None:
    """Return the first images (N, C, H, W) of a batch; None if it has none."""
    return next((values for values in tensors(batch) if are_images(values)), None)


def to_pictures(images: Tensor, channels_last: bool = False) -> npt.NDArray[np.uint8]:
    """Return images as uint8 (N, H, W, C), each stretched from its smallest to its largest value.

    Images that are uint8, or whose values all lie in [0, 1], keep their brightness. Images on a device are read back.
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
    """Return a number (N,) or a mask (N, H, W) for each of the first N samples of a batch; None if there is neither.

    Args:
        values: values of the batch: numbers (B,) or (B, 1), masks (B, H, W) or (B, 1, H, W), floating-point scores of
            C > 1 classes (B, C) or (B, C, H, W), or scores of a single class (B, 1, H, W).
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


def make_captions(columns: Mapping[str, Any], samples: Sequence[int | None] | None = None) -> list[str]:
    """Return captions such as 'sample 3: loss 2.603, target 2, prediction 6'; none if there is nothing to say.

    Args:
        columns: a list or a tensor (N,) of numbers by name; what is None or has another shape is left out.
        samples: indices of the N samples, None for one that is not known.
    """
    texts = []
    for name, values in columns.items():
        numbers = values.tolist() if isinstance(values, Tensor) else values or []
        if numbers and not isinstance(numbers[0], list):
            texts.append([f"{name} {_short(number)}" for number in numbers])
    captions = [", ".join(parts) for parts in zip(*texts, strict=True)]
    if samples is None:
        return captions
    names = [f"sample {'?' if index is None else index}" for index in samples]
    return [f"{name}: {text}" for name, text in zip(names, captions, strict=True)] if captions else names


def show_text(inputs: Tensor | None, place: int, decode: Callable[[list[int]], str] | None = None) -> str:
    """Return a sample of tokens (N, T) as text; '' if it has no tokens.

    Without a function from tokens to text, tokens are shown as bytes if possible, otherwise as numbers.
    """
    if inputs is None or inputs.ndim != 2 or inputs.is_floating_point():
        return ""
    tokens = inputs[place].tolist()
    if decode is not None:
        text = decode(tokens)
    elif all(0 <= token < 256 for token in inputs.flatten().tolist()):
        text = bytes(tokens).decode(errors="replace")
    else:
        text = " ".join(map(str, tokens))
    return shorten(" ".join(text.split()), TEXT)


def draw_images(images: Tensor, captions: Sequence[str], title: str, kind: str) -> bytes:
    """Return one picture of images with captions, as the content of a file.

    Args:
        images: images (N, C, H, W) with one channel or three, N at least 1.
        captions: captions of the N images.
        title: the title of the picture.
        kind: 'png', 'svg' or 'pdf'.
    """
    rows = math.ceil(len(images) / COLUMNS)
    with style():
        figure = make_figure(7.0, 0.4 + 2.0 * rows)
        figure.suptitle(shorten(title, 80), fontsize="medium")
        for place, (picture, caption) in enumerate(zip(to_pictures(images), captions, strict=True)):
            axes = figure.add_subplot(rows, COLUMNS, place + 1)
            axes.set_axis_off()
            axes.set_title(textwrap.fill(caption, CAPTION), fontsize="x-small")
            pixels = picture[..., 0] if picture.shape[-1] == 1 else picture
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    return render(figure, kind)


def _short(value: float) -> str:
    """Return a score with four digits, or a class number in full."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:d}"
