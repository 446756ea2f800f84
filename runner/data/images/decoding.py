"""List image files, and open images from files or bytes as 8-bit RGB, in the same way for all loaders."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from runner.files.printable import printable
from runner.files.whole import open_regular
from runner.libraries.hugging_face import import_hf

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
"""Formats that Pillow may decode, whatever the name of the file: some other formats start programs."""
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""The transposition that makes an image upright, by the value of that tag."""


def open_image(source: Any, name: str = "image") -> Any:
    """Return an image as a Pillow image of mode RGB, made upright by its EXIF data.

    16-bit gray images are scaled to 8 bits. Transparency is dropped.

    Args:
        source: path of a file, the content of a file as bytes, or a Pillow image.
        name: what messages call the image, unless the source is a path.

    Raises:
        ValueError: the source is not an image of `FORMATS`, is damaged or too large for Pillow, or its values have no
            known range, as in a file of floats.
    """
    shown = printable(source if isinstance(source, str | Path) else name)
    try:
        if isinstance(source, str | Path):
            with open_regular(source) as file:
                return _to_rgb(import_hf("PIL.Image").open(file, formats=FORMATS))
        if isinstance(source, bytes):
            source = import_hf("PIL.Image").open(io.BytesIO(source), formats=FORMATS)
        return _to_rgb(source)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # Pillow's decoders raise all kinds
        is_unknown = type(error).__name__ == "UnidentifiedImageError"
        reason = (
            f"its format is not one of {', '.join(FORMATS)}"
            if is_unknown
            else printable(" ".join(str(error).split()) or type(error).__name__)
        )
        raise ValueError(f"{shown}: cannot be read as an image: {reason}; replace it, or leave it out") from error


def find_images(folder: Path) -> Iterator[Path]:
    """Yield the image files in a folder and below, sorted by name, without hidden files and folders."""
    for root, _, files in sorted(os.walk(folder, followlinks=True)):
        for path in (Path(root, name) for name in sorted(files)):
            if path.suffix.lower() in SUFFIXES and not is_hidden(path.relative_to(folder).as_posix()):
                yield path


def is_hidden(path: str) -> bool:
    """Return whether a part of a path is hidden, such as `.ipynb_checkpoints`, or `._7.png` from a Mac."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def _to_rgb(image: Any) -> Any:
    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode in ("I", "F") and not has_16_bits:
        kind = "whole numbers" if image.mode == "I" else "floats"
        raise ValueError(f"its values are {kind} of 32 bits, whose range is not known, so save it with 8 or 16 bits")
    if (turn := TURNS.get(_orientation(image))) is not None:
        image = image.transpose(import_hf("PIL.Image").Transpose[turn])
    if has_16_bits:
        values = numpy.asarray(image).astype(numpy.float32)
        image = import_hf("PIL.Image").fromarray((values / 257).round().astype(numpy.uint8))
    return image.convert("RGB")


def _orientation(image: Any) -> Any:
    try:
        return image.getexif().get(ORIENTATION)
    except Exception:  # damaged EXIF data; the image is usable without it
        return None
