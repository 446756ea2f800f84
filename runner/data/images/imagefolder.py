"""Images in folders, one folder per class, such as ImageNet; worker processes read them with torchvision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.fake import FakeLoader, faked_by
from runner.data.images.decoding import SUFFIXES, find_images, is_hidden, open_image
from runner.data.images.normalization import IMAGENET
from runner.data.images.pixels import Preparation
from runner.data.loaders import DatasetLoader
from runner.data.new_rows import images_at
from runner.failures.checks import check_counts
from runner.failures.errors import wrong_argument
from runner.files.printable import printable
from runner.files.values import InnerPath, LocalPath
from runner.libraries.torchvision import import_torchvision

EVAL_MARGIN = 256 / 224  # ratio of the shorter side to the size of the center crop


def _fake(
    path: str,
    test_folder: str | None,
    image_size: int,
    eval_image_size: int,
    batch_size: int,
    eval_batch_size: int,
    transforms: Any = None,
    eval_transforms: Any = None,
    **_: Any,
) -> tuple[FakeLoader, ...]:
    _check(image_size, eval_image_size, transforms, eval_transforms)
    train, *held_out = _folders(path, test_folder)
    classes = len(_classes_in(train))

    def loader(folder: Path, size: int, batch_size: int) -> FakeLoader:
        def make(samples: int) -> tuple[Tensor, Tensor]:
            images = torch.randint(256, (samples, 3, size, size), dtype=torch.uint8)
            # The largest label, so that a model with too few classes fails.
            return images, torch.full((samples,), classes - 1)

        images = sum(len([*find_images(kind)]) for kind in _classes_in(folder))
        return FakeLoader(make, images, batch_size, IMAGENET)

    evaluation = (loader(folder, eval_image_size, eval_batch_size) for folder in held_out)
    return loader(train, image_size, batch_size), *evaluation


def _new_rows(
    eval_image_size: int, eval_batch_size: int, num_workers: int, eval_transforms: Any, **_: Any
) -> tuple[ImageFolder, dict[str, Any]]:
    images = ImageFolder(None, _center_crop(eval_image_size, eval_transforms))
    return images, {"batch_size": eval_batch_size, "num_workers": num_workers, "transform": IMAGENET}


@faked_by(_fake, _new_rows)
def load_imagefolder(
    path: LocalPath = "data/imagenet",
    test_folder: InnerPath | None = None,
    image_size: int = 224,
    eval_image_size: int = 224,
    batch_size: int = 256,
    eval_batch_size: int = 256,
    num_workers: int = 8,
    seed: int = 0,
    transforms: Sequence[Callable[[Any], Any]] | None = None,
    eval_transforms: Sequence[Callable[[Any], Any]] | None = None,
) -> tuple[DatasetLoader, ...]:
    """Return a training loader over `path/train` and an evaluation loader over `path/val`.

    With `test_folder`, there is a test loader as well.

    Each folder contains one folder of images per class, with the same names in all. Batches are `(images, labels)`:
    float32 `(N, 3, size, size)`, normalized by ImageNet's mean and standard deviation, and int64 `(N,)`, the number of
    the class in the order of names. Images are read as uint8, and normalized by the process that reads them or, in
    training on a GPU, on the GPU. Training images are random crops of 8 to 100 % of the area, resized to a square and
    mirrored with probability 1/2; images for evaluation and testing are center crops. The random choices depend on
    seed, epoch and sample alone.

    Args:
        path: a folder with the folders `train` and `val`.
        test_folder: name of the folder in `path` of images to test on, such as `'test'`; None: no test loader.
        image_size: height and width of training images, in pixels.
        eval_image_size: height and width of evaluation and test images, in pixels.
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        num_workers: processes that read on each rank; 0 reads in this process.
        seed: seed of the order and of the augmentation.
        transforms: functions applied to a training image one after another, instead of the random crop and the mirror,
            such as those of `torchvision.transforms.v2`. The first takes a Pillow image of mode RGB; the last returns
            one, or a tensor, uint8 `(3, image_size, image_size)`; images are normalized afterwards. None: the above.
        eval_transforms: the same for images for evaluation and testing, with `eval_image_size`.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        FileNotFoundError: a folder is missing, or a class has no images.
        ValueError: a size is below 1, a folder has other classes than `train`, or an entry of the transforms is not a
            function; or, while reading, transforms return something other than the image above.
    """
    _check(image_size, eval_image_size, transforms, eval_transforms)
    train_folder, *other_folders = _folders(path, test_folder)
    random_crop, _ = image_transforms(image_size, eval_image_size)
    if transforms is not None:
        random_crop = OwnTransforms("transforms", transforms, image_size)
    center_crop = _center_crop(eval_image_size, eval_transforms)
    train = ImageFolder(train_folder, random_crop)
    held_out = [ImageFolder(folder, center_crop) for folder in other_folders]
    for folder, images in zip(other_folders, held_out, strict=True):
        if differing := sorted({*train.classes} ^ {*images.classes}):
            owner = "train" if differing[0] in train.classes else folder.name
            reason = f"must have the same classes, but only {owner} has {differing[0]!r}"
            raise wrong_argument("path", path, f"train and {folder.name} {reason}")
    options: dict[str, Any] = {"num_workers": num_workers, "transform": IMAGENET}
    loader = DatasetLoader(train, batch_size, shuffle=True, seed=seed, **options)
    return loader, *(DatasetLoader(images, eval_batch_size, shuffle=False, **options) for images in held_out)


class ImageFolder(Dataset[tuple[Any, ...]]):
    """Images in folders, one folder per class, sorted by name, without hidden files and folders.

    Args:
        folder: the folder that contains the folders of the classes; None: no images, only for `new_rows`.
        transform: applied to each image, a Pillow image of mode RGB.

    Attributes:
        classes: the sorted class names.
        transform: the argument.

    Raises:
        FileNotFoundError: there are no classes, or a class has no images.
    """

    def __init__(self, folder: Path | None, transform: Callable[[Any], Any]) -> None:
        folders = [] if folder is None else _classes_in(folder)
        self.classes = [folder.name for folder in folders]
        self.transform = transform
        images = [[*find_images(folder)] for folder in folders]
        empty = [printable(name) for name, files in zip(self.classes, images, strict=True) if not files]
        if folder is not None and (empty or not folders):
            reason = f"the folder of class {empty[0]!r} has no images" if empty else "there is no folder of a class"
            raise FileNotFoundError(f"{folder}: {reason}; they end in {', '.join(sorted(SUFFIXES))}")
        self.ids: list[str] = []  # of new rows
        self._samples: list[tuple[str, int | None]] = [
            (str(file), label) for label, files in enumerate(images) for file in files
        ]

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def preparation(self) -> Callable[[Any], Any]:
        """The transform; a served model applies it too if it is a `Preparation`."""
        return self.transform

    @property
    def targets(self) -> Tensor:
        """The class number of each image, `(images,)`."""
        return torch.tensor([label for _, label in self._samples if label is not None])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        path, label = self._samples[index]
        image = self.transform(open_image(path))
        return (image,) if label is None else (image, label)

    def new_rows(self, path: Path) -> ImageFolder:
        """Return the images in a folder, or one image, without labels; the attribute `ids` has their names."""
        files, ids = images_at(path)
        images = copy.copy(self)
        images.ids = ids
        images._samples = [(str(file), None) for file in files]
        return images


class OwnTransforms:
    """The user's transforms, applied one after another, from a Pillow image to uint8 `(3, size, size)`."""

    def __init__(self, name: str, transforms: Sequence[Callable[[Any], Any]], size: int) -> None:
        self._name = name
        # The last one leaves tensors as they are.
        self._transforms = [*transforms, import_torchvision("torchvision.transforms.v2").PILToTensor()]
        self._size = size

    def __call__(self, image: Any) -> Tensor:
        for transform in self._transforms:
            image = transform(image)
        shape = (3, self._size, self._size)
        is_tensor = isinstance(image, Tensor)
        if not is_tensor or image.dtype != torch.uint8 or image.shape != shape:
            actual = f"{image.dtype} {tuple(image.shape)}" if is_tensor else type(image).__qualname__
            raise ValueError(
                f"{self._name}: they must return a Pillow image or a tensor, torch.uint8 {shape}, not {actual}; resize "
                "or crop to the size of the images, and leave out conversions to float and the normalization"
            )
        return image.as_subclass(Tensor)  # without the type that v2.ToImage gives


def image_transforms(image_size: int, eval_image_size: int) -> tuple[Any, Any]:
    """Return two transforms from a Pillow image to uint8 `(3, size, size)`: a random crop and the center crop.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    v2 = import_torchvision("torchvision.transforms.v2")
    random_crop = v2.Compose([v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return random_crop, _center_crop(eval_image_size)


def _center_crop(size: int, transforms: Any = None) -> Callable[[Any], Tensor]:
    """Return how images are prepared for evaluation."""
    if transforms is not None:
        return OwnTransforms("eval_transforms", transforms, size)
    return Preparation(size, round(size * EVAL_MARGIN), IMAGENET.mean, IMAGENET.std)


def check_image_sizes(image_size: int, eval_image_size: int) -> None:
    """Raise ValueError for a size below 1 pixel."""
    check_counts(image_size=image_size, eval_image_size=eval_image_size)


def _check(image_size: int, eval_image_size: int, transforms: Any, eval_transforms: Any) -> None:
    check_image_sizes(image_size, eval_image_size)
    check_transforms(transforms, eval_transforms)


def check_transforms(transforms: Any, eval_transforms: Any) -> None:
    """Raise ValueError for transforms that are neither None nor a list of functions."""
    for name, value in (("transforms", transforms), ("eval_transforms", eval_transforms)):
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if value is not None and not (is_list and all(callable(transform) for transform in value)):
            example = "[{_target_: torchvision.transforms.v2.CenterCrop, size: 224}]"
            raise wrong_argument(name, value, f"must be a list of functions of an image, such as {example}")


def _classes_in(folder: Path) -> list[Path]:
    """Return the folders of the classes in a folder, sorted by name."""
    folders = (path for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))
    return sorted(folders, key=lambda path: path.name)


def _folders(path: str, test_folder: str | None) -> list[Path]:
    """Return the folders of images for training, evaluation and, with a `test_folder`, testing."""
    folders = [Path(path, name) for name in ("train", "val", test_folder) if name is not None]
    if test_folder in ("train", "val"):
        raise wrong_argument("test_folder", test_folder, "must not hold the images for training and evaluation")
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"path={path!r}: the folder {folder} is missing; create it, with one folder of images for each class"
            )
    return folders
