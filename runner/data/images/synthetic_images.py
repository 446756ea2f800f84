"""Images generated from a seed, of any size and number: for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.core.randomness import stream_seed
from runner.data.fake import FakeLoader, data_function
from runner.data.loaders import TensorLoader
from runner.failures.checks import check_counts, check_number, check_whole


@dataclass(frozen=True)
class SyntheticImages:
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

    num_samples: int = 1024
    num_classes: int = 10
    channels: int = 3
    size: int = 32
    noise: float = 1.0
    batch_size: int = 64
    eval_samples: int = 256
    eval_batch_size: int = 256
    test_samples: int = 0
    seed: int = 0

    def load(self) -> tuple[TensorLoader, ...]:
        """Return the loaders."""
        self._check()
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "images"))
        class_images = torch.randn(self.num_classes, self.channels, self.size, self.size, generator=generator)

        def draw(samples: int) -> tuple[Tensor, Tensor]:
            labels = torch.arange(samples) % self.num_classes
            images = torch.randn(samples, *class_images.shape[1:], generator=generator)
            return images.mul_(self.noise).add_(class_images[labels]), labels

        images, labels = draw(self.num_samples + self.eval_samples)
        count = self.num_samples
        train = TensorLoader(images[:count], labels[:count], batch_size=self.batch_size, shuffle=True, seed=self.seed)
        held_out = [(images[count:], labels[count:]), *([draw(self.test_samples)] if self.test_samples else [])]
        return train, *(TensorLoader(*part, batch_size=self.eval_batch_size, shuffle=False) for part in held_out)

    def fake(self) -> tuple[FakeLoader, ...]:
        """Return loaders of made-up batches."""
        self._check()

        def make(samples: int) -> tuple[Tensor, Tensor]:
            # The largest label, so that a model with too few classes fails.
            labels = torch.full((samples,), self.num_classes - 1)
            return torch.randn(samples, self.channels, self.size, self.size), labels

        held_out = [size for size in (self.eval_samples, self.test_samples) if size]
        train = FakeLoader(make, self.num_samples, self.batch_size)
        return train, *(FakeLoader(make, size, self.eval_batch_size) for size in held_out)

    def _check(self) -> None:
        check_counts(num_samples=self.num_samples, eval_samples=self.eval_samples)
        check_counts(num_classes=self.num_classes, channels=self.channels, size=self.size)
        check_whole("test_samples", self.test_samples, 0)
        check_number("noise", self.noise, "[0, inf]")


load_synthetic_images = data_function("load_synthetic_images", SyntheticImages)
