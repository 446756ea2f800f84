"""Images on their way to MLflow, which has no captions: they are drawn beneath."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CAPTION_WIDTH = 160  # pixels: MLflow's grid shows about this, and a dozen words fit
LINE_HEIGHT = 14
LINE_LENGTH = 26  # characters of the default font in CAPTION_WIDTH


def read_images(path: Path, captions: Sequence[str] | None) -> list[Image.Image]:
    """The images of an array file of shape (N, H, W, C), C 1 or 3, uint8, with their captions, if any."""
    images = [Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array) for array in np.load(path)]
    if captions is None:
        return images
    return [add_caption(image, caption) for image, caption in zip(images, captions, strict=True)]


def add_caption(image: Image.Image, caption: str) -> Image.Image:
    """The image with a strip of text beneath, enlarged by a whole factor until the text fits."""
    factor = max(1, -(-CAPTION_WIDTH // image.width))
    image = image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    lines = [caption[start : start + LINE_LENGTH] for start in range(0, len(caption), LINE_LENGTH)]
    canvas = Image.new("RGB", (image.width, image.height + LINE_HEIGHT * len(lines) + 4), "white")
    canvas.paste(image)
    ImageDraw.Draw(canvas).multiline_text((2, image.height + 2), "\n".join(lines), fill="black")
    return canvas
