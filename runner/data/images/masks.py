"""Images, and masks that give each pixel a class, in two folders with the same file names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.fake import FakeLoader, faked_by
from runner.data.images.decoding import find_images, open_image
from runner.data.images.imagefolder import check_image_sizes, check_transforms
from runner.data.images.normalization import IMAGENET
from runner.data.images.pixels import FORMATS, upright
from runner.data.loaders import DatasetLoader
from runner.data.new_rows import images_at
from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.files.printable import printable
from runner.files.values import InnerPath, LocalPath
from runner.files.whole import open_regular
from runner.libraries.hugging_face import import_hf
from runner.libraries.torchvision import import_torchvision

IGNORED = 255
"""The value of mask pixels that have no class."""
LOSSLESS = ("PNG", "BMP", "TIFF", "GIF", "PPM")
"""Formats of masks, whose class numbers must be exact."""
CLASSES = ("background", "object")


def _fake(
    path: str,
    classes: Sequence[str] | None,
    test_folder: str | None,
    image_size: int,
    eval_image_size: int,
    batch_size: int,
    eval_batch_size: int,
    transforms: Any = None,
    eval_transforms: Any = None,
    **_: Any,
) -> tuple[FakeLoader, ...]:
    classes = CLASSES if classes is None else classes
    _check(classes, image_size, eval_image_size, transforms, eval_transforms)

    def loader(folder: Path, size: int, batch_size: int) -> FakeLoader:
        def make(samples: int) -> tuple[Tensor, Tensor]:
            # The largest label, so that a model with too few classes fails.
            masks = torch.full((samples, size, size), len(classes) - 1)
            return torch.randint(256, (samples, 3, size, size), dtype=torch.uint8), masks

        return FakeLoader(make, len(_pairs(folder)), batch_size, prepare)

    train, *held_out = (Path(path, name) for name in ("train", "val", test_folder) if name is not None)
    evaluation = (loader(folder, eval_image_size, eval_batch_size) for folder in held_out)
    return loader(train, image_size, batch_size), *evaluation


def _new_rows(
    classes: Any, eval_image_size: int, eval_batch_size: int, num_workers: int, eval_transforms: Any, **_: Any
) -> tuple[ImageMasks, dict[str, Any]]:
    transforms = _default_transforms(1, eval_image_size)[1] if eval_transforms is None else eval_transforms
    images = ImageMasks(None, classes or CLASSES, transforms, eval_image_size, "eval_transforms")
    return images, {"batch_size": eval_batch_size, "num_workers": num_workers, "transform": prepare}


@faked_by(_fake, _new_rows)
def load_image_masks(
    path: LocalPath = "data/segmentation",
    classes: Sequence[str] | None = None,
    test_folder: InnerPath | None = None,
    image_size: int = 256,
    eval_image_size: int = 256,
    batch_size: int = 16,
    eval_batch_size: int = 16,
    num_workers: int = 4,
    seed: int = 0,
    transforms: Sequence[Callable[..., Any]] | None = None,
    eval_transforms: Sequence[Callable[..., Any]] | None = None,
) -> tuple[DatasetLoader, ...]:
    """Return a training loader over `path/train` and an evaluation loader over `path/val`, for semantic segmentation.

    Each of these folders contains `images` and `masks`; the mask of `images/a.jpg` is `masks/a.png`, an 8-bit image of
    the same size, gray or with a palette. Each is turned upright by its own EXIF data, so a mask without any must match
    the image as viewers show it. Mask values are class numbers, or 255 for pixels that count in neither the loss nor
    the metrics. Batches are `(images, masks)`: float32 `(N, 3, size, size)`, normalized by ImageNet's mean and standard
    deviation, and int64 `(N, size, size)`. Training images are random crops of 50 to 100 % of the area, resized to a
    square and mirrored with probability 1/2; images for evaluation and testing are resized to a square. Masks are
    cropped and mirrored like them, without interpolation. The random choices depend on seed, epoch and sample alone.

    Args:
        path: a folder with the folders `train` and `val`.
        classes: names of the classes, starting with that of mask value 0. None: background and object.
        test_folder: name of the folder in `path` to test on, such as `'test'`; None: no test loader.
        image_size: height and width of training images, in pixels.
        eval_image_size: height and width of evaluation and test images, in pixels.
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        num_workers: processes that read on each rank; 0 reads in this process.
        seed: seed of the order and of the augmentation.
        transforms: functions of `(image, mask)` that return both, applied one after another instead of the random crop
            and the mirror, such as those of `torchvision.transforms.v2`, which make the same random choices for both.
            They take an `Image` and a `Mask` of `torchvision.tv_tensors`; the last returns uint8
            `(3, image_size, image_size)` and uint8 `(image_size, image_size)`; images are normalized afterwards. None:
            as described above.
        eval_transforms: the same for images for evaluation and testing, with `eval_image_size`.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        FileNotFoundError: a folder or a mask is missing, or there are no images.
        ValueError: an argument is out of range, or an entry of the transforms is not a function; or, while reading, a
            mask is not as described above, or transforms return something else.
    """
    classes = CLASSES if classes is None else classes
    _check(classes, image_size, eval_image_size, transforms, eval_transforms)
    default, eval_default = _default_transforms(image_size, eval_image_size)
    transforms = default if transforms is None else transforms
    eval_transforms = eval_default if eval_transforms is None else eval_transforms
    train = ImageMasks(Path(path, "train"), classes, transforms, image_size, "transforms")
    names = ["val"] if test_folder is None else ["val", test_folder]
    held_out = [
        ImageMasks(Path(path, name), classes, eval_transforms, eval_image_size, "eval_transforms") for name in names
    ]
    options: dict[str, Any] = {"num_workers": num_workers, "transform": prepare}
    loader = DatasetLoader(train, batch_size, shuffle=True, seed=seed, **options)
    return loader, *(DatasetLoader(images, eval_batch_size, shuffle=False, **options) for images in held_out)


class ImageMasks(Dataset[tuple[Tensor, ...]]):
    """Images and their masks in the folders `images` and `masks`, sorted by name, without hidden files.

    Args:
        folder: the folder that contains `images` and `masks`; None: no images, only for `new_rows`.
        classes: the names of the classes.
        transforms: functions of an image and a mask, applied one after another.
        size: height and width of the images that they return, in pixels.
        argument: name of the argument with the transforms, for messages.

    Raises:
        FileNotFoundError: a folder or a mask is missing, or there are no images.
    """

    def __init__(
        self,
        folder: Path | None,
        classes: Sequence[str],
        transforms: Sequence[Callable[..., Any]],
        size: int,
        argument: str,
    ) -> None:
        self.classes = [*classes]
        self._transforms = [*transforms]
        self._size = size
        self._argument = argument
        self._samples = [] if folder is None else _pairs(folder)
        self.ids: list[str] = []  # names of the images, for new rows only

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        tv_tensors = import_torchvision("torchvision.tv_tensors")
        path, mask_path = self._samples[index]
        pixels = torch.from_numpy(numpy.array(open_image(path))).permute(2, 0, 1)
        values = torch.zeros(pixels.shape[1:], dtype=torch.uint8) if mask_path is None else self._read_mask(mask_path)
        if values.shape != pixels.shape[1:]:
            sizes = f"{tuple(values.shape)} pixels, but its image {tuple(pixels.shape[1:])}"
            remedy = "both need the same height and width"
            if values.mT.shape == pixels.shape[1:]:
                remedy = "if it was made from the stored pixels, remove the orientation from the image's EXIF data"
            raise ValueError(f"{printable(str(mask_path))}: the mask has {sizes}; {remedy}")
        pair = tv_tensors.Image(pixels), tv_tensors.Mask(values)
        for transform in self._transforms:
            pair = transform(*pair)
        self._check_pair(pair)
        image, mask = (part.as_subclass(Tensor) for part in pair)
        return (image,) if mask_path is None else (image, mask)

    def new_rows(self, path: Path) -> ImageMasks:
        """Return the images in a folder, or one image, without masks; the attribute `ids` holds their names."""
        files, ids = images_at(path)
        images = copy.copy(self)
        images.ids = ids
        images._samples = [(str(file), None) for file in files]
        return images

    def _read_mask(self, path: str) -> Tensor:
        with open_regular(path) as file, import_hf("PIL.Image").open(file, formats=FORMATS) as mask:
            if mask.mode not in ("L", "P") or mask.format not in LOSSLESS:
                shown = f"is {mask.format} with mode {mask.mode}"
                reason = f"{shown}, but must be {' or '.join(LOSSLESS)}, gray or with a palette (mode L or P)"
                raise ValueError(f"{printable(path)}: the mask {reason}; its values are class numbers")
            values = torch.from_numpy(numpy.array(upright(mask)))
        wrong = values[(values >= len(self.classes)) & (values != IGNORED)]
        if len(wrong):
            reason = f"only {len(self.classes)} classes, 0 to {len(self.classes) - 1}, and {IGNORED} for no class"
            raise ValueError(f"{printable(path)}: the mask has value {int(wrong[0])}, but data.classes names {reason}")
        return values

    def _check_pair(self, pair: Any) -> None:
        expected = [(torch.uint8, (3, self._size, self._size)), (torch.uint8, (self._size, self._size))]
        is_pair = isinstance(pair, tuple | list) and all(isinstance(part, Tensor) for part in pair)
        actual = [(part.dtype, tuple(part.shape)) for part in pair] if is_pair else type(pair).__qualname__
        if actual != expected:
            raise ValueError(
                f"{self._argument}: they must return an image and a mask, {expected}, not {actual}; resize or crop to "
                "that size, and leave out conversions to float and the normalization"
            )


def _default_transforms(image_size: int, eval_image_size: int) -> tuple[list[Any], list[Any]]:
    v2 = import_torchvision("torchvision.transforms.v2")
    crop = v2.RandomResizedCrop(image_size, scale=(0.5, 1.0), antialias=True)
    return [crop, v2.RandomHorizontalFlip()], [v2.Resize([eval_image_size, eval_image_size], antialias=True)]


def prepare(batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a batch with its images normalized by ImageNet's statistics, and its masks as int64."""
    return IMAGENET.apply(batch[0]), *(masks.long() for masks in batch[1:])


vars(prepare)["normalization"] = IMAGENET


def _check(classes: Any, image_size: int, eval_image_size: int, transforms: Any, eval_transforms: Any) -> None:
    names = [] if isinstance(classes, str) or not isinstance(classes, Sequence) else [*classes]
    fits = len({*names}) == len(names) and 2 <= len(names) <= IGNORED and all(isinstance(name, str) for name in names)
    refuse_if(not fits, "classes", classes, f"must be 2 to {IGNORED} different names, that of mask value 0 first")
    check_image_sizes(image_size, eval_image_size)
    check_transforms(transforms, eval_transforms)


def _pairs(folder: Path) -> list[tuple[str, str | None]]:
    """Return the path of each image in a folder with that of its mask.

    Raises:
        FileNotFoundError: a folder or a mask is missing, or there are no images.
        ValueError: an image has two masks.
    """
    for part in (folder / "images", folder / "masks"):
        if not part.is_dir():
            raise FileNotFoundError(f"the folder {part} is missing; it must hold the {part.name} of data.path")
    masks: dict[str, Path] = {}
    for mask in find_images(folder / "masks"):
        name = mask.relative_to(folder / "masks").with_suffix("").as_posix()
        if name in masks:
            raise wrong_argument("path", str(folder), f"{masks[name].name} and {mask.name} are both the mask of {name}")
        masks[name] = mask
    pairs: list[tuple[str, str | None]] = []
    for image in find_images(folder / "images"):
        name = image.relative_to(folder / "images").with_suffix("")
        if name.as_posix() not in masks:
            shown = printable(str(image))
            raise FileNotFoundError(f"{shown} has no mask; add {folder / 'masks' / name}.png, or leave the image out")
        pairs.append((str(image), str(masks[name.as_posix()])))
    if not pairs:
        raise FileNotFoundError(f"{folder / 'images'} holds no images")
    return pairs
