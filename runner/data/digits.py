"""Scikit-learn's handwritten digits: 1797 real images of 8 by 8 pixels in 10 classes, no download."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch
from torch import Tensor

from runner.data.loaders import TensorLoader

NUM_TRAIN = 1200  # the first samples; the others were written by other people


def load_digits(batch_size: int = 64, eval_batch_size: int = 597, seed: int = 0) -> tuple[TensorLoader, TensorLoader]:
    """Returns a training loader of the first 1200 digits and an evaluation loader of the last 597.

    Batches are ``(images, labels)``: float32 ``(N, 1, 8, 8)`` with the training pixels' mean and standard deviation
    taken to 0 and 1, and int64 ``(N,)`` in [0, 10). The writers of the evaluation digits are not among those of the
    training digits.

    Args:
        batch_size: samples in a training batch, all ranks together.
        eval_batch_size: samples in an evaluation batch, all ranks together.
        seed: of the order of the training samples.

    Raises:
        ModuleNotFoundError: scikit-learn, in whose folder the data lies, is not installed.
        FileNotFoundError: the installed scikit-learn does not have the file.
    """
    images, labels = _read_digits()
    train_pixels = images[:NUM_TRAIN]
    images = (images - train_pixels.mean()) / train_pixels.std(correction=0)
    train = TensorLoader(images[:NUM_TRAIN], labels[:NUM_TRAIN], batch_size=batch_size, shuffle=True, seed=seed)
    evaluation = TensorLoader(images[NUM_TRAIN:], labels[NUM_TRAIN:], batch_size=eval_batch_size, shuffle=False)
    return train, evaluation


def _read_digits() -> tuple[Tensor, Tensor]:
    # Importing scikit-learn takes two seconds, and only its file is needed.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits lie in scikit-learn's folder: pip install scikit-learn", name="sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: install a scikit-learn that has it (1.0 or later)")
    text = gzip.decompress(path.read_bytes()).decode()
    # One value after another is twenty times faster than numpy's reader of tables.
    values = numpy.fromstring(text.replace("\n", ","), dtype=numpy.float32, sep=",")
    table = torch.from_numpy(values).view(-1, 65)
    return table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].long()
