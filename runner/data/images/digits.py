"""Scikit-learn's handwritten digits: 1797 real images of 8 by 8 pixels in 10 classes, without a download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.data.fake import FakeLoader, faked_by
from runner.data.images.normalization import UNCHANGED
from runner.data.loaders import TensorLoader
from runner.failures.checks import check_whole

NUM_TRAIN = 1200  # the first samples; the others are for evaluation
NUM_EVAL = 597


def _fake(batch_size: int, eval_batch_size: int, test_samples: int, **_: Any) -> tuple[FakeLoader, ...]:
    _check(test_samples)

    def make(samples: int) -> tuple[Tensor, Tensor]:
        # The largest label, so that a model with too few classes fails.
        return torch.rand(samples, 1, 8, 8), torch.full((samples,), 9)

    train = FakeLoader(make, NUM_TRAIN, batch_size)
    train.normalization = UNCHANGED
    evaluation = FakeLoader(make, NUM_EVAL - test_samples, eval_batch_size)
    return (train, evaluation, FakeLoader(make, test_samples, eval_batch_size)) if test_samples else (train, evaluation)


@faked_by(_fake)
def load_digits(
    batch_size: int = 64, eval_batch_size: int = 597, test_samples: int = 0, seed: int = 0
) -> tuple[TensorLoader, ...]:
    """Return a training loader of the first 1200 digits and an evaluation loader of the other 597.

    With `test_samples`, the last of these are in a third loader.

    Batches are `(images, labels)`: float32 `(N, 1, 8, 8)` in [0, 1], and int64 `(N,)` in [0, 10). The background is 0,
    as is the padding of augmentations. The split follows the order of scikit-learn's file. Source: Alpaydin and Kaynak
    1998, the test set of UCI's "Optical Recognition of Handwritten Digits".

    Args:
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        test_samples: number of digits to test on, the last of the 597; 0: no test loader.
        seed: seed of the order of the training samples.

    Raises:
        ValueError: `test_samples` is negative, or leaves no sample to evaluate on.
        ModuleNotFoundError: scikit-learn, which contains the data, is not installed.
        FileNotFoundError: the installed scikit-learn lacks the file.
    """
    _check(test_samples)
    table = _read_digits()
    # Use numpy, which needs only one thread: waking torch's takes a tenth of a second on a busy machine.
    images = torch.from_numpy(table[:, :64] / 16).view(-1, 1, 8, 8)
    labels = torch.from_numpy(table[:, 64].astype(numpy.int64))
    train = TensorLoader(images[:NUM_TRAIN], labels[:NUM_TRAIN], batch_size=batch_size, shuffle=True, seed=seed)
    train.normalization = UNCHANGED
    end = len(images) - test_samples
    evaluation = TensorLoader(images[NUM_TRAIN:end], labels[NUM_TRAIN:end], batch_size=eval_batch_size, shuffle=False)
    if not test_samples:
        return train, evaluation
    return train, evaluation, TensorLoader(images[end:], labels[end:], batch_size=eval_batch_size, shuffle=False)


def _check(test_samples: int) -> None:
    check_whole("test_samples", test_samples, 0, most=NUM_EVAL - 1)


def _read_digits() -> NDArray[numpy.float32]:
    """Return the table `(1797, 65)`: in each row 64 pixels in [0, 16], and the label."""
    # Importing scikit-learn takes two seconds, and only its file is needed.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn", name="sklearn"
        )
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: install scikit-learn again")
    return numpy.loadtxt(path, delimiter=",", dtype=numpy.float32)
