"""Decode an image and prepare it for a network, in evaluations and in served models alike.

MLflow models carry a copy of this file. Therefore, it imports nothing of the runner.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

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
"""The transposition that turns an image upright, by the value of that tag."""


class Preparation(NamedTuple):
    """How an evaluation resizes, crops and normalizes images; plain values, so that JSON can hold them.

    Attributes:
        size: height and width of the center crop, in pixels; None keeps images whole.
        shorter: pixels to which the shorter side is resized first, with the rounding of torchvision's `Resize` and
            `CenterCrop`; None resizes it to `size`.
        mean, std: of each channel, for pixels in [0, 1].
    """

    size: int | None
    shorter: int | None
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: Any) -> Tensor:
        """Return a Pillow image of mode RGB, resized and cropped, as uint8 `(3, H, W)`."""
        size, shorter = self.size, self.shorter
        if size is not None:
            least = min(image.size)
            if shorter is None:
                sides = [max(size, round(side * (size / least))) for side in image.size]
                left, top = ((side - size) // 2 for side in sides)
            else:
                sides = [shorter if side == least else int(shorter * side / least) for side in image.size]
                left, top = (round((side - size) / 2) for side in sides)
            image = image.resize(sides, 2).crop((left, top, left + size, top + size))  # 2: bilinear
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)

    def normalized(self, images: Tensor) -> Tensor:
        """Return images, uint8 `(..., 3, H, W)`, as normalized float32."""
        mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (self.mean, self.std))
        return images.to(torch.float32).mul_(1 / 255).sub_(mean).div_(std)


def read_rgb(source: Any) -> Any:
    """Return an image as a Pillow image of mode RGB, turned upright as its EXIF data says.

    16-bit gray images are scaled to 8 bits. Transparency is dropped.

    Args:
        source: an open file, the content of a file as bytes, or a Pillow image.

    Raises:
        ValueError: the source is not an image of `FORMATS`, is damaged or too large for Pillow, or its values have no
            known range, as in a file of floats.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        return _to_rgb(Image.open(file, formats=FORMATS) if hasattr(file, "read") else file)
    except UnidentifiedImageError as error:
        raise ValueError(f"its format is not one of {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's decoders raise all kinds
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode in ("I", "F") and not has_16_bits:
        kind = "whole numbers" if image.mode == "I" else "floats"
        raise ValueError(f"its values are 32-bit {kind}, whose range is not known, so save it with 8 or 16 bits")
    image = upright(image)
    if has_16_bits:
        values = numpy.asarray(image).astype(numpy.float32)
        image = Image.fromarray((values / 257).round().astype(numpy.uint8))
    return image.convert("RGB")


def upright(image: Any) -> Any:
    """Return a Pillow image turned or mirrored as its EXIF data says; values and mode stay the same."""
    from PIL import Image

    turn = TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(Image.Transpose[turn])


def _orientation(image: Any) -> Any:
    try:
        return image.getexif().get(ORIENTATION)
    except Exception:  # damaged EXIF data; the image is usable without it
        return None
