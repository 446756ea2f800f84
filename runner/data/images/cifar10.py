"""CIFAR-10: 60,000 color images of 32 by 32 pixels in 10 classes, downloaded on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.archive import check_source, fetch_archive, find_missing
from runner.data.fake import FakeLoader, data_function
from runner.data.images.imagefolder import OwnTransforms, check_transforms
from runner.data.images.normalization import Normalization
from runner.data.images.pixels import Preparation
from runner.data.loaders import DatasetLoader, OrderedLoader, TensorLoader
from runner.failures.checks import check_counts, check_whole, refuse_if
from runner.failures.errors import wrong_argument
from runner.files.values import Address, LocalPath
from runner.libraries.hugging_face import import_hf

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # published next to the archive
FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"{FOLDER}/data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = (f"{FOLDER}/test_batch.bin",)
RECORD = 1 + 3 * 32 * 32  # bytes: the label; then the red, the green and the blue plane, each row by row
NUM_TRAIN = 50_000
NUM_TEST = 10_000
NUM_CLASSES = 10
# Over all pixels of the 50,000 training images; red, green and blue.
NORMALIZATION = Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
PREPARATION = Preparation(32, None, NORMALIZATION.mean, NORMALIZATION.std)


@dataclass(frozen=True)
class Cifar10:
    """Return a training loader of CIFAR-10's 50,000 training images and an evaluation loader of its 10,000 test images.

    This is the usual way to report a recipe whose settings are fixed. To choose anything by accuracy (a checkpoint, a
    learning rate), evaluate on `eval_samples` of the training images instead: the test images then become a third
    loader, which `test=best` evaluates once at the end.

    Batches are `(images, labels)`: float32 `(N, 3, 32, 32)`, red, green and blue, normalized by the mean and standard
    deviation of each channel over the training images, and int64 `(N,)` in [0, 10). In memory the images are uint8, 184
    MB on each rank's device; there they become float32 batch by batch. With transforms of your own, images stay in the
    memory of the host, and worker processes transform them one by one; random choices then depend on seed, epoch and
    sample alone.

    The files are those of the binary version: `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin` in
    `path/cifar-10-batches-bin`, with any number of images. If a file is missing, one process downloads the archive of
    170 MB, while other ranks and runs wait. Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny
    Images", https://www.cs.toronto.edu/~kriz/cifar.html.

    Args:
        path: the folder that contains, or is to contain, the folder `cifar-10-batches-bin`.
        url: address of the archive `cifar-10-binary.tar.gz`; None never downloads it.
        md5: checksum of the archive, 32 hexadecimal digits; None skips the check.
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        eval_samples: number of training images to evaluate on, the last ones, which are in random order; 0 evaluates
            on the test images.
        seed: seed of the order of the training samples, and of the transforms.
        num_workers: processes that transform images on each rank; 0 transforms in this process. Without transforms,
            none is started.
        transforms: functions applied to a training image one after another, such as those of
            `torchvision.transforms.v2`. The first takes a Pillow image of mode RGB; the last returns one, or a tensor,
            uint8 `(3, 32, 32)`; images are normalized afterwards. None: images as they are.
        eval_transforms: the same for images for evaluation and testing.

    Raises:
        ModuleNotFoundError: there are transforms, and torchvision is not installed.
        FileNotFoundError: a file is missing, and url is None.
        ConnectionError: the archive cannot be downloaded.
        ValueError: an argument is out of range or not valid, the checksum differs, or a file is not one of CIFAR-10.
        OSError: the disk is full, or the folder cannot be written to.
    """

    path: LocalPath = "data/cifar10"
    url: Address | None = URL
    md5: str | None = MD5
    batch_size: int = 128
    eval_batch_size: int = 1000
    eval_samples: int = 0
    seed: int = 0
    num_workers: int = 2
    transforms: Sequence[Callable[[Any], Any]] | None = None
    eval_transforms: Sequence[Callable[[Any], Any]] | None = None

    def load(self) -> tuple[OrderedLoader, ...]:
        """Return a training, an evaluation and perhaps a test loader."""
        self._check()
        if _is_missing(self.path, self.url) and self.url is not None:
            fetch_archive(self.url, self.md5, self.path, [*TRAIN_FILES, *TEST_FILES])
        images, labels = _read(self.path, TRAIN_FILES)
        self._check_eval_samples(len(images))
        start = len(images) - self.eval_samples
        held_out = [part for part in ((images[start:], labels[start:]), _read(self.path, TEST_FILES)) if len(part[0])]
        train = images[:start], labels[:start]
        options: dict[str, Any] = {"batch_size": self.eval_batch_size, "shuffle": False}
        return (
            self._make(train, "transforms", batch_size=self.batch_size, shuffle=True, seed=self.seed),
            *(self._make(part, "eval_transforms", **options) for part in held_out),
        )

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return loaders of made-up batches; nothing is downloaded, and files are only counted."""
        self._check()
        num_train = NUM_TRAIN
        num_test = NUM_TEST
        if not _is_missing(self.path, self.url):
            num_train, num_test = (
                sum(_count(self.path, name) for name in names) for names in (TRAIN_FILES, TEST_FILES)
            )
        self._check_eval_samples(num_train)

        def make(samples: int) -> tuple[Tensor, Tensor]:
            images = torch.randint(256, (samples, 3, 32, 32), dtype=torch.uint8)
            # The largest label, so that a model with too few classes fails.
            return images, torch.full((samples,), NUM_CLASSES - 1)

        train = FakeLoader(make, num_train - self.eval_samples, self.batch_size, NORMALIZATION)
        sizes = [size for size in (self.eval_samples, num_test) if size]
        return train, *(FakeLoader(make, size, self.eval_batch_size, NORMALIZATION) for size in sizes)

    def _make(self, part: tuple[Tensor, Tensor], name: str, **order: Any) -> OrderedLoader:
        transforms = getattr(self, name)
        loader: OrderedLoader
        if self.transforms is None and self.eval_transforms is None:
            loader = TensorLoader(*part, transform=NORMALIZATION, **order)
        else:
            dataset = _Pictures(*part, OwnTransforms(name, transforms or [], 32))
            loader = DatasetLoader(dataset, num_workers=self.num_workers, transform=NORMALIZATION, **order)
        if transforms is None:
            loader.preparation = PREPARATION
        return loader

    def _check(self) -> None:
        check_source(self.url, self.md5)
        check_counts(batch_size=self.batch_size, eval_batch_size=self.eval_batch_size)
        check_whole("seed", self.seed, 0)
        check_whole("num_workers", self.num_workers, 0, "a number of processes")
        check_transforms(self.transforms, self.eval_transforms)

    def _check_eval_samples(self, num_train: int) -> None:
        allowed = f"must be 0, to evaluate on the test images, or at most {num_train - 1} of the training images"
        refuse_if(not 0 <= self.eval_samples < num_train, "eval_samples", self.eval_samples, allowed)


load_cifar10 = data_function("load_cifar10", Cifar10)


class _Pictures(Dataset[tuple[Any, Tensor]]):
    """Images, uint8 `(N, 3, H, W)`, which `transform` takes as Pillow images, and their labels `(N,)`."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Any], Any]) -> None:
        self.images = images
        self.targets = labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        pixels = self.images[index].permute(1, 2, 0).numpy()
        return self.transform(import_hf("PIL.Image").fromarray(pixels)), self.targets[index]


def _is_missing(path: str, url: str | None) -> bool:
    """Return whether a file has to be downloaded.

    Raises:
        FileNotFoundError: a file is missing, and url is None.
    """
    missing = find_missing(path, [*TRAIN_FILES, *TEST_FILES])
    if missing and url is None:
        raise FileNotFoundError(
            f"path={path!r}: {Path(path, missing[0])} is missing; unpack {URL} in this folder, or give the archive's "
            "address as url, from which it is then downloaded"
        )
    return bool(missing)


def _count(path: str, name: str) -> int:
    """Return the number of images in a file."""
    file = Path(path, name)
    size = file.stat().st_size
    if size == 0 or size % RECORD:
        raise wrong_argument(
            "path",
            path,
            f"{file} has {size} bytes, but must hold one or more records of {RECORD} bytes; remove it, and unpack "
            f"{URL} again",
        )
    return size // RECORD


def _read(path: str, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the images of files, uint8 `(N, 3, 32, 32)`, and their labels, int64 `(N,)`."""
    counts = [_count(path, name) for name in names]
    images = numpy.empty((sum(counts), RECORD - 1), dtype=numpy.uint8)
    labels = numpy.empty(sum(counts), dtype=numpy.int64)
    start = 0
    for name, count in zip(names, counts, strict=True):
        records = numpy.fromfile(Path(path, name), dtype=numpy.uint8).reshape(count, RECORD)
        if (largest := records[:, 0].max()) >= NUM_CLASSES:
            raise wrong_argument(
                "path",
                path,
                f"{Path(path, name)} has label {largest}, but CIFAR-10 has only 0 to 9; remove it, and unpack "
                f"{URL} again",
            )
        labels[start : start + count] = records[:, 0]
        images[start : start + count] = records[:, 1:]
        start += count
    return torch.from_numpy(images).view(-1, 3, 32, 32), torch.from_numpy(labels)
