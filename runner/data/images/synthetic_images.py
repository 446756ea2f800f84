"""Images generated from a seed, of any size and number: for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.core.randomness import stream_seed
from runner.data.fake import FakeLoader, faked_by
from runner.data.loaders import TensorLoader
from runner.failures.checks import check_counts, check_number, check_whole


def _fake(
    num_classes: int,
    channels: int,
    size: int,
    num_samples: int,
    batch_size: int,
    eval_samples: int,
    eval_batch_size: int,
    test_samples: int,
    noise: float,
    **_: Any,
) -> tuple[FakeLoader, ...]:
    _check(num_samples, num_classes, channels, size, noise, eval_samples, test_samples)

    def make(samples: int) -> tuple[Tensor, Tensor]:
        # The largest label, so that a model with too few classes fails.
        return torch.randn(samples, channels, size, size), torch.full((samples,), num_classes - 1)

    train = FakeLoader(make, num_samples, batch_size)
    evaluation = FakeLoader(make, eval_samples, eval_batch_size)
    return (train, evaluation, FakeLoader(make, test_samples, eval_batch_size)) if test_samples else (train, evaluation)


@faked_by(_fake)
def load_synthetic_images(
    num_samples: int = 1024,
    num_classes: int = 10,
    channels: int = 3,
    size: int = 32,
    noise: float = 1.0,
    batch_size: int = 64,
    eval_samples: int = 256,
    eval_batch_size: int = 256,
    test_samples: int = 0,
    seed: int = 0,
) -> tuple[TensorLoader, ...]:
    """Return loaders of images that can be learned: one random image per class, plus noise.

    There is a training loader, an evaluation loader and, with `test_samples`, a test loader.

    Batches are `(images, labels)`: float32 `(N, channels, size, size)` and int64 `(N,)`. Class sizes differ by at most
    one.

    Args:
        num_samples: number of training images.
        num_classes: number of classes.
        channels: number of channels of an image.
        size: height and width, in pixels.
        noise: standard deviation of the noise, at least 0; the class images have a standard deviation of 1.
        batch_size: samples in a training batch, all ranks together.
        eval_samples: number of evaluation images, with different noise.
        eval_batch_size: samples in an evaluation or test batch, all ranks together.
        test_samples: number of test images, drawn after all others; 0: no test loader.
        seed: seed of the images and of the order of the training samples.

    Raises:
        ValueError: a number is below 1, or the noise is negative.
    """
    _check(num_samples, num_classes, channels, size, noise, eval_samples, test_samples)
    generator = torch.Generator().manual_seed(stream_seed(seed, "images"))
    class_images = torch.randn(num_classes, channels, size, size, generator=generator)
    labels = torch.arange(num_samples + eval_samples) % num_classes
    images = torch.randn(len(labels), channels, size, size, generator=generator).mul_(noise).add_(class_images[labels])
    train = TensorLoader(images[:num_samples], labels[:num_samples], batch_size=batch_size, shuffle=True, seed=seed)
    evaluation = TensorLoader(images[num_samples:], labels[num_samples:], batch_size=eval_batch_size, shuffle=False)
    if not test_samples:
        return train, evaluation
    labels = torch.arange(test_samples) % num_classes
    images = torch.randn(test_samples, channels, size, size, generator=generator).mul_(noise).add_(class_images[labels])
    return train, evaluation, TensorLoader(images, labels, batch_size=eval_batch_size, shuffle=False)


def _check(
    num_samples: int,
    num_classes: int,
    channels: int,
    size: int,
    noise: float,
    eval_samples: int,
    test_samples: int,
) -> None:
    check_counts(num_samples=num_samples, eval_samples=eval_samples)
    check_counts(num_classes=num_classes, channels=channels, size=size)
    check_whole("test_samples", test_samples, 0)
    check_number("noise", noise, "[0, inf]")
