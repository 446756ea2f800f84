"""Images in folders, one folder per class, such as ImageNet; read by worker processes, with torchvision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.fake import FakeLoader, faked_by
from runner.data.images.decoding import SUFFIXES, find_images, is_hidden, open_image
from runner.data.loaders import DatasetLoader
from runner.failures.checks import check_counts
from runner.failures.errors import wrong_argument
from runner.files.printable import printable
from runner.files.values import InnerPath, LocalPath
from runner.libraries.torchvision import import_torchvision

# Statistics of ImageNet: red, green and blue in [0, 1].
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
EVAL_MARGIN = 256 / 224  # of the shorter side before the center is cut out


def _fake(
    path: str,
    test_folder: str | None,
    image_size: int,
    eval_image_size: int,
    batch_size: int,
    eval_batch_size: int,
    **_: Any,
) -> tuple[FakeLoader, ...]:
    check_image_sizes(image_size, eval_image_size)
    train, *others = _folders(path, test_folder)
    classes = len(_classes_in(train))
    mean, std = _mean_and_std(torch.device("cpu"))

    def loader(folder: Path, size: int, batch_size: int) -> FakeLoader:
        def make(samples: int) -> tuple[Tensor, Tensor]:
            images = (torch.rand(samples, 3, size, size) - mean) / std
            # The largest label, so that a model with too few classes is found.
            return images, torch.full((samples,), classes - 1)

        return FakeLoader(make, sum(len([*find_images(one)]) for one in _classes_in(folder)), batch_size)

    return loader(train, image_size, batch_size), *(loader(one, eval_image_size, eval_batch_size) for one in others)


@faked_by(_fake)
def load_imagefolder(
    path: LocalPath = "data/imagenet",
    test_folder: InnerPath | None = None,
    image_size: int = 224,
    eval_image_size: int = 224,
    batch_size: int = 256,
    eval_batch_size: int = 256,
    num_workers: int = 8,
    seed: int = 0,
) -> tuple[DatasetLoader, ...]:
    """Return a training loader over `path/train` and an evaluation loader over `path/val`; a test loader as third.

    The third is there if `test_folder` is given.

    Each has one folder of images per class, with the same names in all. Batches are `(images, labels)`: float32
    `(N, 3, size, size)`, normalized by ImageNet's mean and deviation, and int64 `(N,)`, the number of the class in
    the order of names. They are read as uint8, and normalized by the process that reads them or, in training on a GPU,
    there. Training images are random parts of 8 to 100 % of the area, made square, half of them mirrored;
    those for evaluation and testing are the center. Which part is drawn depends on seed, epoch and sample alone.

    Args:
        path: a folder with the folders `train` and `val`.
        test_folder: the folder in it of images to test on, such as `'test'`; None: there is no test loader.
        image_size: height and width of training images, in pixels.
        eval_image_size: height and width of evaluation and test images, in pixels.
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        num_workers: processes that read on each rank; 0 reads in this process.
        seed: seed of the order and of the random parts.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        FileNotFoundError: a folder is missing, or a class has no images.
        ValueError: a size is below 1, or a folder has other classes than `train`.
    """
    check_image_sizes(image_size, eval_image_size)
    train_folder, *other_folders = _folders(path, test_folder)
    random_part, center = image_transforms(image_size, eval_image_size)
    train = ImageFolder(train_folder, random_part)
    others = [ImageFolder(one, center) for one in other_folders]
    for folder, other in zip(other_folders, others, strict=True):
        if differing := sorted({*train.classes} ^ {*other.classes}):
            reason = f"must have the same classes, but only one of them has {differing[0]!r}"
            raise wrong_argument("path", path, f"train and {folder.name} {reason}")
    options: dict[str, Any] = {"num_workers": num_workers, "transform": normalize}
    return (
        DatasetLoader(train, batch_size, shuffle=True, seed=seed, **options),
        *(DatasetLoader(one, eval_batch_size, shuffle=False, **options) for one in others),
    )


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images in folders, one folder per class, in the order of their names; hidden files and folders are left out.

    Args:
        folder: the folder with the folders of classes.
        transform: what a Pillow image of mode RGB becomes.

    Attributes:
        classes: the names of the classes, sorted.

    Raises:
        FileNotFoundError: a class has no images, or there is none.
    """

    def __init__(self, folder: Path, transform: Callable[[Any], Any]) -> None:
        folders = _classes_in(folder)
        self.classes = [one.name for one in folders]
        self._transform = transform
        images = [[*find_images(one)] for one in folders]
        empty = [printable(name) for name, files in zip(self.classes, images, strict=True) if not files]
        if empty or not folders:
            what = f"the folder of class {empty[0]!r} has no images" if empty else "there is no folder of a class"
            raise FileNotFoundError(f"{folder}: {what}; they end in {', '.join(sorted(SUFFIXES))}")
        self._samples = [(str(file), label) for label, files in enumerate(images) for file in files]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self._samples[index]
        return self._transform(open_image(path)), label


def image_transforms(image_size: int, eval_image_size: int) -> tuple[Any, Any]:
    """Return what makes uint8 `(3, size, size)` of a Pillow image: a random part of it, and the center.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    v2 = import_torchvision("torchvision.transforms.v2")
    random_part = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
    center = [v2.Resize(round(eval_image_size * EVAL_MARGIN)), v2.CenterCrop(eval_image_size)]
    return v2.Compose([*random_part, v2.PILToTensor()]), v2.Compose([*center, v2.PILToTensor()])


def normalize(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return images `(N, 3, H, W)`, uint8, as float32 normalized by ImageNet's mean and deviation, and their labels."""
    return normalized(batch[0]), batch[1]


def normalized(images: Tensor) -> Tensor:
    """Return images `(..., 3, H, W)`, uint8, as float32 normalized by ImageNet's mean and deviation."""
    mean, std = _mean_and_std(images.device)
    return images.to(torch.float32).mul_(1 / 255).sub_(mean).div_(std)


@functools.cache  # once a device: a copy for each batch would wait for the device
def _mean_and_std(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of a channel, float32 `(3, 1, 1)` each."""
    mean, std = (torch.tensor(one, device=device).view(3, 1, 1) for one in (MEAN, STD))
    return mean, std


def check_image_sizes(image_size: int, eval_image_size: int) -> None:
    """Raise ValueError for a size below 1 pixel."""
    check_counts(image_size=image_size, eval_image_size=eval_image_size)


def _classes_in(folder: Path) -> list[Path]:
    """Return the folders of classes in a folder, in the order of their names."""
    folders = (one for one in folder.iterdir() if one.is_dir() and not is_hidden(one.name))
    return sorted(folders, key=lambda one: one.name)


def _folders(path: str, test_folder: str | None) -> list[Path]:
    """Return the folders of the images for training, evaluation and, if there is one, testing."""
    folders = [Path(path, one) for one in ("train", "val", test_folder) if one is not None]
    if test_folder in ("train", "val"):
        raise wrong_argument(
            "test_folder", test_folder, "must hold other images than those for training and evaluation"
        )
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"path={path!r}: the folder {folder} is missing; create it, with one folder of images for each class"
            )
    return folders
