"""Compare the CPU time of our loaders with that of torch's DataLoader, on the same data in the same run.

    python benchmarks/loader.py

2,000 JPEG files, made on the fly, are read with random crops and flips by the main process and by two workers. Token
windows come from one long tensor in memory, which torch's loader indexes for each sample. The output is the ratio of
our CPU time to torch's, including workers: the median of rounds that take turns, and the quartiles. Each case has a
process of its own, because the heap of an earlier case would change the figures.

Our loader seeds three generators for each sample, so that augmentation is the same for any number of workers and after
a resume. This takes 9 us a sample, half of it for Python's `random`. With workers our loader saves about as much
elsewhere: images are copied into their batch as soon as they are read, and labels are sent by value.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from runner.data import DatasetLoader, TensorLoader

LIMITS = {"images, 0 workers": 1.05, "images, 2 workers": 1.0, "token windows": 1.0}
IMAGES, SIZE, BATCH = 2000, 224, 64
CONTEXT, WINDOWS = 128, 20_000


class Images(Dataset[tuple[Tensor, int]]):
    """JPEG files, cropped and flipped at random."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.files[index]) as file:
            image = numpy.asarray(file.convert("RGB"))
        top, left = random.randrange(SIZE // 8), int(torch.randint(SIZE // 8, ()))
        image = image[top : top + 7 * SIZE // 8, left : left + 7 * SIZE // 8]
        pixels = image[:, ::-1] if numpy.random.rand() < 0.5 else image
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), index % 10


def make_images(folder: Path) -> None:
    """Write the files: smooth noise, which takes about as much space as a photograph."""
    from PIL import Image

    generator = numpy.random.default_rng(0)
    for number in range(IMAGES):
        coarse = Image.fromarray(generator.integers(0, 256, (SIZE // 8, SIZE // 8, 3), dtype=numpy.uint8))
        coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(folder / f"{number:05}.jpg", quality=90)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a long tensor of tokens, each with the window one token later."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        return self.tokens[start : start + CONTEXT], self.tokens[start + 1 : start + CONTEXT + 1]


def cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants: workers, and the server from which ours are forked."""
    descendants = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(sum(times[:4]) for times in descendants)


def measure(case: str, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of an epoch in each round, after a warm-up round."""
    torch.set_num_threads(1)
    variants = cases(folder)[case]()
    times: dict[str, list[float]] = {key: [] for key in variants}
    for number in range(rounds + 1):
        for key, loader in variants.items():
            start_time = cpu_seconds()
            for _ in loader:
                pass
            if number:
                times[key].append(cpu_seconds() - start_time)
    return times


def cases(folder: Path) -> dict[str, Callable[[], dict[str, Iterable[Any]]]]:
    """Return functions that make our loader and torch's, by case."""

    def images(workers: int) -> dict[str, Iterable[Any]]:
        data = Images(folder)
        return {
            "ours": DatasetLoader(data, BATCH, shuffle=True, num_workers=workers),
            "torch": DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
        }

    def windows() -> dict[str, Iterable[Any]]:
        tokens = torch.randint(0, 50_000, (WINDOWS * CONTEXT + 1,))
        pairs = (tokens[:-1].view(-1, CONTEXT), tokens[1:].view(-1, CONTEXT))
        return {
            "ours": TensorLoader(*pairs, batch_size=BATCH, shuffle=True),
            "torch": DataLoader(Windows(tokens), BATCH, shuffle=True),
        }

    return {"images, 0 workers": lambda: images(0), "images, 2 workers": lambda: images(2), "token windows": windows}


def main() -> int:
    """Print the ratios; exit code 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted epochs of each loader (default 7)")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        make_images(Path(name))
        for key in LIMITS:
            with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
                times = pool.submit(measure, key, Path(name), arguments.rounds).result()
            ratios = sorted(ours / theirs for ours, theirs in zip(times["ours"], times["torch"], strict=True))
            low, median, high = statistics.quantiles(ratios, n=4)
            samples = WINDOWS if key == "token windows" else IMAGES
            costs = " and ".join(f"{1e6 * statistics.median(seconds) / samples:.1f}" for seconds in times.values())
            print(
                f"{key:>18}: {median:.3f} times ({low:.3f} to {high:.3f}; limit {LIMITS[key]:.2f}), {costs} us a sample"
            )
            failed |= median > LIMITS[key]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
