"""Shows samples to people: images with captions, and texts of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.pictures.figure import make_figure, render, shorten, style

COLUMNS = 4  # pictures in a row
TEXT = 160  # characters of a text


def inputs_and_targets(batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the first tensor of a batch, and the second one; None for what it does not have."""
    values = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    found = [one for one in values if isinstance(one, Tensor) and one.ndim]
    return (found[0] if found else None), (found[1] if len(found) > 1 else None)


def describe_target(targets: Tensor | None, outputs: Any, place: int) -> str:
    """Return the class of a sample and the class that the model gives it, as far as they are classes; else ''."""
    parts = []
    if targets is not None and targets.ndim in (1, 2):
        parts += _class("target", targets, place)
    if isinstance(outputs, Tensor) and outputs.ndim == 2:
        parts += _class("predicted", outputs, place)
    return ", ".join(parts)


def is_image(inputs: Tensor | None) -> bool:
    """Return whether a tensor holds images (N, C, H, W) with one channel or three."""
    return inputs is not None and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def show_text(inputs: Tensor | None, place: int, decode: Callable[[list[int]], str] | None = None) -> str:
    """Return a sample of tokens (N, T) as text; '' if it has no tokens.

    Without a function from tokens to text, tokens are shown as bytes if possible, otherwise as numbers.
    """
    if inputs is None or inputs.ndim != 2 or inputs.is_floating_point():
        return ""
    tokens = inputs[place].tolist()
    if decode is not None:
        text = decode(tokens)
    elif all(0 <= one < 256 for one in inputs.flatten().tolist()):
        text = bytes(tokens).decode(errors="replace")
    else:
        text = " ".join(map(str, tokens))
    return shorten(" ".join(text.split()), TEXT)


def draw_images(images: Tensor, captions: Sequence[str], title: str, kind: str) -> bytes:
    """Return a picture of images with captions, as the content of a file.

    Args:
        images: images (N, C, H, W) with one channel or three, N at least 1; each is stretched to its range of values.
        captions: captions of the N images.
        title: the title of the picture.
        kind: 'png', 'svg' or 'pdf'.
    """
    rows = math.ceil(len(images) / COLUMNS)
    with style():
        figure = make_figure(7.0, 0.4 + 2.0 * rows)
        figure.suptitle(shorten(title, 80), fontsize="medium")
        for place, (image, caption) in enumerate(zip(_stretched(images), captions, strict=True)):
            axes = figure.add_subplot(rows, COLUMNS, place + 1)
            axes.set_axis_off()
            axes.set_title(caption, fontsize="x-small")
            axes.imshow(image.squeeze(-1).numpy(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    return render(figure, kind)


def _class(name: str, values: Tensor, place: int) -> list[str]:
    if values.ndim == 2:
        return [f"{name} {int(values[place].argmax())}"] if values.is_floating_point() else []
    value = values[place].item()
    return [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"]


def _stretched(images: Tensor) -> Tensor:
    """Return images (N, C, H, W) as (N, H, W, C) with values in [0, 1]."""
    values = torch.nan_to_num(images.float(), posinf=0.0, neginf=0.0)
    low = values.amin(dim=(1, 2, 3), keepdim=True)
    high = values.amax(dim=(1, 2, 3), keepdim=True)
    return ((values - low) / (high - low).clamp_min(1e-12)).permute(0, 2, 3, 1)
