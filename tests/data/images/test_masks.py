"""Images with masks: both get the same geometric transforms, and errors name the file of a wrong mask."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image, ImageOps
from shapes_to_segment import CLASSES, draw_shapes

from runner.data.images.masks import load_image_masks
from runner.data.images.normalization import IMAGENET
from runner.libraries.torchvision import import_torchvision

pytest.importorskip("torchvision")
MEAN, STD = IMAGENET.mean, IMAGENET.std


def load(folder: Path, **options: Any):
    sizes = {"image_size": 24, "eval_image_size": 32, "batch_size": 8, "eval_batch_size": 3, "num_workers": 0}
    return load_image_masks(str(folder), CLASSES, **{**sizes, **options})


def colors(images: torch.Tensor) -> torch.Tensor:
    return images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


def batches(loader: Any, epoch: int, first: int = 0) -> list[Any]:
    loader.seek(epoch, first)
    return [*loader]


def test_masks_follow_the_crops_and_mirrors_of_their_images(tmp_path: Path):
    train, evaluation = load(draw_shapes(tmp_path))
    for loader, size in ((train, 24), (evaluation, 32)):
        for images, masks in loader:
            assert images.shape[1:] == (3, size, size) and images.dtype == torch.float32
            assert masks.shape[1:] == (size, size) and masks.dtype == torch.int64
            assert {*masks.unique().tolist()} <= {0, 1, 2, 255}
            for number, channel in ((1, 1), (2, 2)):  # the shape of class 1 is green, that of class 2 blue
                inside = colors(images)[:, channel][masks == number]
                outside = colors(images)[:, channel][masks == 0]
                assert inside.quantile(0.25) > 0.4 and outside.quantile(0.9) < 0.4


def test_own_transforms_draw_once_for_an_image_and_its_mask(tmp_path: Path):
    v2 = import_torchvision("torchvision.transforms.v2")
    fill = {import_torchvision("torchvision.tv_tensors").Mask: 255, "others": 0}
    transforms = [v2.RandomRotation(180, fill=fill), v2.RandomCrop(24), v2.ColorJitter(brightness=0.1)]
    train, _ = load(draw_shapes(tmp_path), transforms=transforms)
    whole = batches(train, 1)
    for images, masks in whole:
        assert colors(images)[:, 1][masks == 1].quantile(0.25) > 0.4
    for num_workers, first in ((0, 1), (1, 2)):  # from the middle of an epoch, without and with a worker
        resumed = batches(load(tmp_path, transforms=transforms, num_workers=num_workers)[0], 1, first)
        for pair, expected in zip(resumed, whole[first:], strict=True):
            assert all(torch.equal(*both) for both in zip(pair, expected, strict=True))
    assert not torch.equal(batches(train, 2)[0][0], whole[0][0])


def test_masks_are_rotated_by_their_own_exif_data(tmp_path: Path):
    for folder in ("train", "val"):
        for part in ("images", "masks"):
            (tmp_path / folder / part).mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for orientation in range(1, 9):
        stored = Image.fromarray(generator.integers(256, size=(30, 40, 3), dtype=numpy.uint8))
        exif = Image.Exif()
        exif[0x0112] = orientation
        pixels = Image.fromarray((numpy.array(stored)[..., 0] > 127).astype(numpy.uint8))
        for folder in ("train", "val"):
            stored.save(tmp_path / folder / "images" / f"{orientation}.png", exif=exif)
        pixels.save(tmp_path / "train" / "masks" / f"{orientation}.png", exif=exif)  # rotated like its image
        with Image.open(tmp_path / "val" / "images" / f"{orientation}.png") as image:  # drawn on the rotated image
            shown = numpy.array(ImageOps.exif_transpose(image))[..., 0] > 127
        Image.fromarray(shown.astype(numpy.uint8)).save(tmp_path / "val" / "masks" / f"{orientation}.png")
    crop = [import_torchvision("torchvision.transforms.v2").CenterCrop(30)]
    for loader in load(tmp_path, image_size=30, eval_image_size=30, transforms=crop, eval_transforms=crop):
        for images, masks in loader:
            assert torch.equal(masks, (colors(images)[:, 0] > 0.5).long()) and 0.4 < masks.float().mean() < 0.6
    Image.new("L", (40, 30)).save(tmp_path / "val" / "masks" / "6.png")
    wrong = r"6\.png: the mask has \(30, 40\) pixels, but its image \(40, 30\); if it was made from the stored pixels"
    with pytest.raises(ValueError, match=wrong):
        list(load(tmp_path, image_size=30, eval_image_size=30, transforms=crop, eval_transforms=crop)[1])


def test_errors_name_wrong_masks_and_missing_files(tmp_path: Path):
    draw_shapes(tmp_path)
    mask = tmp_path / "val" / "masks" / "00.png"
    for image, message in (
        (Image.new("L", (40, 40), 3), r"00\.png: the mask has value 3, but data.classes names only 3 classes, 0 to 2"),
        (Image.new("RGB", (40, 40)), r"00\.png: the mask is PNG with mode RGB, but must be PNG or"),
        (Image.new("L", (9, 40)), r"00\.png: the mask has \(40, 9\) pixels, but its image \(40, 40\)"),
    ):
        image.save(mask)
        with pytest.raises(ValueError, match=message):
            next(iter(load(tmp_path)[1]))
    Image.new("L", (40, 40)).save(mask, format="JPEG")  # its compression changes class numbers
    with pytest.raises(ValueError, match=r"the mask is JPEG with mode L, but must be PNG or"):
        next(iter(load(tmp_path)[1]))
    mask.unlink()
    with pytest.raises(FileNotFoundError, match=r"00\.png has no mask; add .*masks/00\.png"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="the folder .*images is missing"):
        load(tmp_path / "none")
    with pytest.raises(ValueError, match="transforms: they must return an image and a mask"):
        next(load(draw_shapes(tmp_path / "new"), transforms=[])[0].first(1))
    for classes in ("ab", ["a"], ["a", "a"]):
        with pytest.raises(ValueError, match=r"^classes=.* must be 2 to 255 different names"):
            load_image_masks(str(tmp_path), classes)
