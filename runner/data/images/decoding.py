"""List image files, and open images from files or bytes as 8-bit RGB, in the same way for all loaders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.data.images.pixels import read_rgb
from runner.files.printable import printable
from runner.files.whole import open_regular
from runner.libraries.hugging_face import import_hf

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})


def open_image(source: Any, name: str = "image") -> Any:
    """Return an image as a Pillow image of mode RGB, turned upright as its EXIF data says.

    16-bit gray images are scaled to 8 bits. Transparency is dropped.

    Args:
        source: path of a file, the content of a file as bytes, or a Pillow image.
        name: what messages call the image, unless the source is a path.

    Raises:
        ValueError: the source is not an image of `FORMATS`, is damaged or too large for Pillow, or its values have no
            known range, as in a file of floats.
    """
    shown = printable(source if isinstance(source, str | Path) else name)
    import_hf("PIL")  # says how to install it
    try:
        if isinstance(source, str | Path):
            with open_regular(source) as file:
                return read_rgb(file)
        return read_rgb(source)
    except (OSError, ValueError) as error:
        reason = printable(" ".join(str(error).split()))
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
