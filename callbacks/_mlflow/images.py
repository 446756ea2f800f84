"""Images on their way to MLflow, which has no captions: they are drawn beneath."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

PREVIEW = 256  # pixels of the longer side of what the UI shows first
CAPTION_WIDTH = 160  # pixels: MLflow's grid shows about this, and a dozen words fit
LINE_HEIGHT = 14
LINE_LENGTH = 26  # characters of the default font in CAPTION_WIDTH


def read_images(path: Path, captions: Sequence[str] | None) -> list[Image.Image]:
    """The images of an array file of shape (N, H, W, C), C 1 or 3, uint8, with their captions, if any."""
    images = [Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array) for array in np.load(path)]
    if captions is None:
        return images
    return [add_caption(image, caption) for image, caption in zip(images, captions, strict=True)]


def save_image(image: Image.Image, folder: Path, key: str, step: int, time_ms: int, identity: str) -> None:
    """Save an image and its preview under the names by which MLflow's UI knows key, step and time.

    MLflow's `log_image` gives each call a name of its own: an image that is sent again would be there twice.

    Args:
        image: to save.
        folder: exists.
        key: cleaned for paths; a `/` groups images.
        step: the batch.
        time_ms: milliseconds since 1970.
        identity: the same for the same image, and for no other.
    """
    stem = f"{key.replace('/', '~')}+step+{step}+timestamp+{time_ms}+{identity}"
    image.save(folder / f"{stem}.png")
    preview = image.copy()
    preview.thumbnail((PREVIEW, PREVIEW))
    preview.save(folder / f"{stem}+compressed.webp")


def add_caption(image: Image.Image, caption: str) -> Image.Image:
    """The image with a strip of text beneath, enlarged by a whole factor until the text fits."""
    factor = max(1, -(-CAPTION_WIDTH // image.width))
    image = image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    lines = [caption[start : start + LINE_LENGTH] for start in range(0, len(caption), LINE_LENGTH)]
    canvas = Image.new("RGB", (image.width, image.height + LINE_HEIGHT * len(lines) + 4), "white")
    canvas.paste(image)
    ImageDraw.Draw(canvas).multiline_text((2, image.height + 2), "\n".join(lines), fill="black")
    return canvas
