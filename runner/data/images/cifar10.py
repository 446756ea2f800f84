"""CIFAR-10: 60,000 color images of 32 by 32 pixels in 10 classes, downloaded on first use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from runner.data.archive import check_source, fetch_archive, find_missing
from runner.data.fake import FakeLoader, faked_by
from runner.data.images.normalization import Normalization
from runner.data.images.pixels import Preparation
from runner.data.loaders import TensorLoader
from runner.failures.checks import check_counts, check_whole, refuse_if
from runner.failures.errors import wrong_argument
from runner.files.values import Address, LocalPath

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # published beside the archive
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


def _fake(
    path: str, url: str | None, md5: str | None, batch_size: int, eval_batch_size: int, eval_samples: int, seed: int
) -> tuple[FakeLoader, ...]:
    _check(url, md5, batch_size, eval_batch_size, seed)
    num_train = NUM_TRAIN
    num_test = NUM_TEST
    if not _is_missing(path, url):
        num_train, num_test = (sum(_count(path, name) for name in names) for names in (TRAIN_FILES, TEST_FILES))
    _check_eval_samples(eval_samples, num_train)

    def make(samples: int) -> tuple[Tensor, Tensor]:
        images = torch.randint(256, (samples, 3, 32, 32), dtype=torch.uint8)
        # The largest label, so that a model with too few classes fails.
        return images, torch.full((samples,), NUM_CLASSES - 1)

    train = FakeLoader(make, num_train - eval_samples, batch_size, NORMALIZATION)
    held_out = [FakeLoader(make, size, eval_batch_size, NORMALIZATION) for size in (eval_samples, num_test) if size]
    return train, *held_out


@faked_by(_fake)
def load_cifar10(
    path: LocalPath = "data/cifar10",
    url: Address | None = URL,
    md5: str | None = MD5,
    batch_size: int = 128,
    eval_batch_size: int = 1000,
    eval_samples: int = 0,
    seed: int = 0,
) -> tuple[TensorLoader, ...]:
    """Return a training loader of CIFAR-10's 50,000 training images and an evaluation loader of its 10,000 test images.

    This is the usual way to report a recipe whose settings are fixed. To choose anything by accuracy (a checkpoint, a
    learning rate), evaluate on `eval_samples` of the training images instead: the test images then become a third
    loader, which `test=best` evaluates once at the end.

    Batches are `(images, labels)`: float32 `(N, 3, 32, 32)`, red, green and blue, normalized by the mean and standard
    deviation of each channel over the training images, and int64 `(N,)` in [0, 10). In memory the images are uint8, 184
    MB on each rank's device; there they become float32 batch by batch.

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
        seed: seed of the order of the training samples.

    Raises:
        FileNotFoundError: a file is missing, and url is None.
        ConnectionError: the archive cannot be downloaded.
        ValueError: an argument is out of range or not valid, the checksum differs, or a file is not one of CIFAR-10.
        OSError: the disk is full, or the folder cannot be written to.
    """
    _check(url, md5, batch_size, eval_batch_size, seed)
    if _is_missing(path, url) and url is not None:
        fetch_archive(url, md5, path, [*TRAIN_FILES, *TEST_FILES])
    images, labels = _read(path, TRAIN_FILES)
    _check_eval_samples(eval_samples, len(images))
    start = len(images) - eval_samples

    def make_unshuffled(images: Tensor, labels: Tensor) -> TensorLoader:
        loader = TensorLoader(images, labels, batch_size=eval_batch_size, shuffle=False, transform=NORMALIZATION)
        loader.preparation = PREPARATION
        return loader

    train = TensorLoader(
        images[:start], labels[:start], batch_size=batch_size, shuffle=True, seed=seed, transform=NORMALIZATION
    )
    test = make_unshuffled(*_read(path, TEST_FILES))
    return (train, make_unshuffled(images[start:], labels[start:]), test) if eval_samples else (train, test)


def _check(url: str | None, md5: str | None, batch_size: int, eval_batch_size: int, seed: int) -> None:
    check_source(url, md5)
    check_counts(batch_size=batch_size, eval_batch_size=eval_batch_size)
    check_whole("seed", seed, 0)


def _check_eval_samples(eval_samples: int, num_train: int) -> None:
    allowed = f"must be 0, to evaluate on the test images, or at most {num_train - 1} of the training images"
    refuse_if(not 0 <= eval_samples < num_train, "eval_samples", eval_samples, allowed)


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
