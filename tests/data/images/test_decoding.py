"""Images with unusual modes, orientations, formats and names, read by every loader of images."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from shard_files import write_tar
from torch import Tensor

from runner.data.images.decoding import find_images, open_image
from runner.data.images.imagefolder import load_imagefolder
from runner.data.images.normalization import IMAGENET
from runner.data.shards.parquet_shards import load_parquet_shards
from runner.data.shards.tar_shards import load_tar_shards

SIDE = 8
GRAY_16 = numpy.linspace(0, 65535, SIDE * SIDE).round().astype(numpy.uint16).reshape(SIDE, SIDE)
GRAY_8 = (GRAY_16 / 257).round().astype(numpy.uint8)


def encoded(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def from_folder(content: bytes, folder: Path) -> Tensor:
    for split in ("train", "val"):
        (folder / split / "a").mkdir(parents=True)
        (folder / split / "a" / "0.png").write_bytes(content)
    size: dict[str, Any] = {"image_size": SIDE, "eval_image_size": SIDE}
    return next(iter(load_imagefolder(str(folder), batch_size=1, eval_batch_size=1, num_workers=0, **size)[1]))[0]


def from_tar(content: bytes, folder: Path) -> Tensor:
    for number in range(2):
        write_tar(folder / f"{number}.tar", {"0.png": content, "0.cls": b"0"})
    size = {"image_size": SIDE, "eval_image_size": SIDE}
    options: dict[str, Any] = {"cache_dir": str(folder / "cache"), "num_workers": 0, **size}
    return next(iter(load_tar_shards(str(folder / "*.tar"), inputs="png", **options)[1]))[0]


def from_parquet(content: bytes, folder: Path) -> Tensor:
    pyarrow: Any = __import__("pyarrow.parquet")
    for number in range(2):
        pyarrow.parquet.write_table(pyarrow.table({"inputs": [content], "targets": [0]}), folder / f"{number}.parquet")
    options: dict[str, Any] = {"cache_dir": str(folder / "cache"), "num_workers": 0, "image_size": SIDE}
    return next(iter(load_parquet_shards(str(folder / "*.parquet"), **options)[1]))[0]


def from_datasets(content: bytes, folder: Path) -> Tensor:
    datasets = pytest.importorskip("datasets")
    from runner.data.hf.columns import Columns

    rows = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None}], "label": [0]})
    columns = Columns(rows.cast_column("image", datasets.Image()), {"inputs": "image", "targets": "label"}, SIDE)
    return IMAGENET(columns.stack([columns[0]]))[0]


LOADERS = [from_folder, from_tar, from_parquet, from_datasets]


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_gray_images_of_16_bits_are_scaled(form: str, load: Callable[..., Tensor], tmp_path: Path):
    pixels = load(encoded(Image.fromarray(GRAY_16), form), tmp_path / "a" if load is from_folder else tmp_path)
    (tmp_path / "8 bits").mkdir()
    assert torch.equal(pixels, load(encoded(Image.fromarray(GRAY_8), form), tmp_path / "8 bits"))
    assert pixels.std() > 0.5  # neither black nor white


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_pixels_are_refused_with_the_name_of_the_file(mode: str, load: Callable[..., Tensor], tmp_path: Path):
    content = encoded(Image.fromarray(GRAY_16.astype(numpy.int32 if mode == "I" else numpy.float32)), "TIFF")
    kind = "whole numbers" if mode == "I" else "floats"
    with pytest.raises(ValueError, match=f"values are 32-bit {kind}, whose range is not known, so save it") as raised:
        load(content, tmp_path)
    names = {from_folder: "val/a/0.png", from_tar: "0.png", from_parquet: "inputs='inputs'", from_datasets: "row 0"}
    assert names[load] in str(raised.value)


@pytest.mark.parametrize("load", LOADERS)
def test_exif_rotation_is_applied(load: Callable[..., Tensor], tmp_path: Path):
    image = Image.fromarray(GRAY_8)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise
    (tmp_path / "turned").mkdir()
    rotated = load(encoded(image, "PNG", exif=exif), tmp_path / "turned")
    (tmp_path / "plain").mkdir()
    expected = load(encoded(image.transpose(Image.Transpose.ROTATE_270), "PNG"), tmp_path / "plain")
    assert torch.equal(rotated, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("pixels", [GRAY_8, GRAY_16])
def test_each_orientation_equals_that_of_pillow(orientation: int, pixels: Any, tmp_path: Path):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels[:5]).save(tmp_path / "a.png", exif=exif)
    plain = Image.fromarray(GRAY_8[:5])
    plain.getexif()[0x0112] = orientation
    expected = ImageOps.exif_transpose(plain).convert("RGB")
    assert numpy.array_equal(numpy.asarray(open_image(tmp_path / "a.png")), numpy.asarray(expected))


@pytest.mark.parametrize("load", LOADERS)
def test_a_file_of_a_format_that_starts_programs_is_refused(load: Callable[..., Tensor], tmp_path: Path):
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    with pytest.raises(ValueError, match="cannot be read as an image: its format is not one of JPEG, PNG"):
        load(content, tmp_path)


@pytest.mark.parametrize("load", LOADERS)
def test_a_truncated_image_is_an_error_of_one_line(load: Callable[..., Tensor], tmp_path: Path):
    noise = numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), numpy.uint8)
    content = encoded(Image.fromarray(noise), "PNG")
    with pytest.raises(ValueError, match="cannot be read as an image: .*; replace it, or leave it out") as raised:
        load(content[: len(content) // 2], tmp_path)
    assert "\n" not in str(raised.value)


def test_an_error_names_the_image_that_is_too_large_for_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    Image.new("L", (9, 9)).save(tmp_path / "a\x1b[31m.png")
    with pytest.raises(ValueError, match=r"/a\\x1b\[31m.png: cannot be read as an image: Image size \(81 pixels\)"):
        open_image(tmp_path / "a\x1b[31m.png")


def test_a_pipe_is_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ValueError, match="a.png: cannot be read as an image: .*not a regular file"):
        open_image(tmp_path / "a.png")


def test_hidden_files_and_folders_are_neither_images_nor_classes(tmp_path: Path):
    from_folder(encoded(Image.fromarray(GRAY_8), "PNG"), tmp_path)
    for split in ("train", "val"):
        for name in ("a/._0.png", "a/.ipynb_checkpoints/0-checkpoint.png", ".ipynb_checkpoints/0.png", "a/0.txt"):
            (tmp_path / split / name).parent.mkdir(exist_ok=True)
            (tmp_path / split / name).write_bytes(b"no image")
    assert [*find_images(tmp_path / "train")] == [tmp_path / "train" / "a" / "0.png"]
    options: dict[str, Any] = {"image_size": SIDE, "eval_image_size": SIDE, "num_workers": 0}
    for load in (load_imagefolder, load_imagefolder.fake):  # type: ignore[attr-defined]
        assert [len(loader.order) for loader in load(str(tmp_path), **options)] == [1, 1]


def test_hidden_members_and_shards_are_left_out(tmp_path: Path):
    content = encoded(Image.fromarray(GRAY_8), "PNG")
    from_tar(content, tmp_path)
    files = {"._0.png": b"x", "0.png": content, "0.cls": b"0", ".ipynb_checkpoints/0.png": b"x"}
    write_tar(tmp_path / "0.tar", files)
    (tmp_path / "._1.tar").write_bytes(b"x")
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "image_size": SIDE, "eval_image_size": SIDE}
    train, _ = load_tar_shards(str(tmp_path), inputs="png", num_workers=0, **options)
    assert len(train.dataset) == 1 and len(next(iter(train))[0]) == 1
