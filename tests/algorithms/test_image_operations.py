"""Operations of TrivialAugment, RandAugment and AugMix against Pillow, which their papers use."""

from __future__ import annotations

import numpy
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from runner.algorithms import _image_operations as ops

HEIGHT, WIDTH = 33, 40
STRENGTHS = [-1.0, -0.4, 0.3, 0.7, 1.0]


def make_levels(channels: int) -> torch.Tensor:
    """Return uint8 images (5, C, 33, 40); the first is constant, and the second has few levels."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(20, 230, (5, channels, HEIGHT, WIDTH), generator=generator, dtype=torch.uint8)
    levels[0] = 77
    levels[1] = levels[1] // 60 * 60
    return levels


def to_pillow(levels: torch.Tensor) -> Image.Image:
    array = levels.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def from_pillow(image: Image.Image) -> torch.Tensor:
    array = torch.from_numpy(numpy.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


PILLOW = {
    "identity": lambda image, s: image,
    "autocontrast": lambda image, s: ImageOps.autocontrast(image),
    "equalize": lambda image, s: ImageOps.equalize(image),
    "posterize": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "solarize": lambda image, s: ImageOps.solarize(image, 255 * (1 - abs(s))),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "color": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
}
EXACT = {"identity", "equalize", "posterize", "solarize"}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", PILLOW)
def test_color_operations_equal_those_of_pillow(name: str, channels: int):
    levels = make_levels(channels)
    operation = getattr(ops, name)
    changed = operation(levels.double() / 255, torch.tensor(STRENGTHS, dtype=torch.float64)) * 255
    expected = torch.stack(
        [from_pillow(PILLOW[name](to_pillow(image), s)) for image, s in zip(levels, STRENGTHS, strict=True)]
    )
    # Pillow rounds the image that it blends with, and the result, to whole levels.
    tolerance = 1e-9 if name in EXACT else 1.6
    torch.testing.assert_close(changed, expected.double(), atol=tolerance, rtol=0)
    assert changed.min() >= 0
    assert changed.max() <= 255 + 1e-9


MATRICES = {
    "shear_x": lambda s: [[1, 0.3 * s, 0], [0, 1, 0]],
    "shear_y": lambda s: [[1, 0, 0], [0.3 * s, 1, 0]],
    "translate_x": lambda s: [[1, 0, -int(s * 150 / 331 * WIDTH)], [0, 1, 0]],
    "translate_y": lambda s: [[1, 0, 0], [0, 1, -int(s * 150 / 331 * HEIGHT)]],
    "rotate": lambda s: [
        [numpy.cos(numpy.radians(30 * s)), numpy.sin(numpy.radians(30 * s)), 0],
        [-numpy.sin(numpy.radians(30 * s)), numpy.cos(numpy.radians(30 * s)), 0],
    ],
}


@pytest.mark.parametrize("name", MATRICES)
def test_geometric_operations_equal_those_of_pillow(name: str):
    levels = make_levels(3)
    strengths = torch.tensor(STRENGTHS, dtype=torch.float64)
    operation = getattr(ops, name)
    changed = operation(levels.double() / 255, strengths) * 255
    inside = operation(torch.ones(5, 1, HEIGHT, WIDTH, dtype=torch.float64), strengths) > 1 - 1e-9
    assert (inside.flatten(1).sum(dim=1) > 0.4 * HEIGHT * WIDTH).all()
    for index, strength in enumerate(STRENGTHS):
        matrix = numpy.array(MATRICES[name](strength), dtype=float)
        center = numpy.array([WIDTH / 2, HEIGHT / 2])
        matrix[:, 2] += center - matrix[:, :2] @ center
        moved = to_pillow(levels[index]).transform(
            (WIDTH, HEIGHT), Image.Transform.AFFINE, matrix.ravel().tolist(), Image.Resampling.BILINEAR
        )
        difference = (changed[index] - from_pillow(moved)).abs() * inside[index]
        assert difference.max() <= 1.0 + 1e-6


def test_images_are_rotated_in_the_direction_of_pillow():
    levels = make_levels(1)[2:3]
    turned = ops.rotate(levels.double() / 255, torch.tensor([1.0], dtype=torch.float64)) * 255
    expected = from_pillow(to_pillow(levels[0]).rotate(-30, Image.Resampling.BILINEAR))
    middle = (slice(None), slice(12, 21), slice(15, 25))
    assert (turned[0][middle] - expected[middle]).abs().max() <= 1.0


@pytest.mark.parametrize("operation", ops.ALL, ids=lambda operation: operation.__name__)
def test_each_image_has_its_own_strength_and_none_is_changed_in_place(operation):
    images = make_levels(3).double() / 255
    copies = images.clone()
    strengths = torch.tensor(STRENGTHS, dtype=torch.float64)
    together = operation(images, strengths)
    one_by_one = torch.cat([operation(images[i : i + 1], strengths[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(together, one_by_one, atol=1e-12, rtol=0)
    assert torch.equal(images, copies)


def test_geometric_operations_and_enhancements_of_strength_zero_change_nothing():
    images = make_levels(3).double() / 255
    geometric = (ops.rotate, ops.shear_x, ops.shear_y, ops.translate_x, ops.translate_y)
    for operation in (*geometric, ops.color, ops.contrast, ops.brightness, ops.sharpness):
        torch.testing.assert_close(operation(images, torch.zeros(5, dtype=torch.float64)), images)


def test_each_image_gets_its_chosen_operation():
    images = make_levels(3).double() / 255
    chosen, strengths = numpy.array([1, 0, 1, -1, 0]), numpy.array(STRENGTHS)
    changed = ops.apply_each(images, [ops.solarize, ops.brightness], chosen, strengths)
    for index, (choice, strength) in enumerate(zip(chosen, STRENGTHS, strict=True)):
        image = images[index : index + 1]
        operation = [ops.solarize, ops.brightness, ops.identity][choice]
        expected = operation(image, torch.tensor([strength], dtype=torch.float64))
        torch.testing.assert_close(changed[index : index + 1], expected, atol=1e-12, rtol=0)
