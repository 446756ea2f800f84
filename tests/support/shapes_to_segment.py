"""Draws images for segmentation: disks are class 1, boxes are class 2, and outlines have no class (255)."""

from __future__ import annotations

from pathlib import Path

import numpy
from PIL import Image, ImageDraw

CLASSES = ("background", "disk", "box")


def draw_shapes(folder: Path, counts: tuple[int, int] = (24, 8), size: int = 40) -> Path:
    """Write images to `train/images` and `val/images` and their masks to `train/masks` and `val/masks`."""
    generator = numpy.random.default_rng(0)
    for split, count in zip(("train", "val"), counts, strict=True):
        for part in ("images", "masks"):
            (folder / split / part).mkdir(parents=True)
        for number in range(count):
            mask = Image.new("L", (size, size - number % 3), 0)
            pen = ImageDraw.Draw(mask)
            x, y = generator.integers(4, size // 2, 2).tolist()
            if number % 2:
                pen.ellipse([x, y, x + 14, y + 14], fill=1, outline=255)
            else:
                pen.rectangle([x, y, x + 12, y + 9], fill=2, outline=255)
            values = numpy.asarray(mask)
            noise = generator.integers(0, 60, (*values.shape, 3))
            pixels = noise + 180 * (values[..., None] == [99, 1, 2])
            Image.fromarray(pixels.astype(numpy.uint8)).save(folder / split / "images" / f"{number:02}.png")
            mask.save(folder / split / "masks" / f"{number:02}.png")
    return folder
