"""Measure what more than one CPU thread saves in training steps of different length.

    python benchmarks/threads.py

`python -m runner` uses a single thread for steps below a number of floating-point operations, see
`runner/config/short_steps.py`. This file times steps of networks for small images, in turn with one thread and with a
thread for each core. The output is the time with all threads as a multiple of the time with one, which must not be much
less than 1 for short steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.config.short_steps import SHORT
from runner.distributed.threads import cores
from runner.models import MLP, ResNet8

LIMIT = 0.85  # least time of a short step with all threads, as a multiple of the time with one
SECONDS = 0.3  # time to measure each number of threads, in each round
CASES = {
    "mlp, 64 numbers": (lambda: MLP(64, (128, 128), 10), (64, 64)),
    "mlp, 784 numbers": (lambda: MLP(784, (1024, 1024), 10), (256, 784)),
    "resnet8 of width 8": (lambda: ResNet8(1, 10, 8), (64, 1, 8, 8)),
    "resnet8 of width 16": (lambda: ResNet8(1, 10, 16), (64, 1, 8, 8)),
    "the same, 128 images": (lambda: ResNet8(1, 10, 16), (128, 1, 8, 8)),
    "the same, 256 images": (lambda: ResNet8(1, 10, 16), (256, 1, 8, 8)),
    "32 x 32 pixels": (lambda: ResNet8(3, 10, 16), (64, 3, 32, 32)),
}
"""Networks, and the shapes of their batches."""


class Step:
    """A training step on one batch."""

    def __init__(self, network: MLP | ResNet8, shape: tuple[int, ...]) -> None:
        self.network = network
        self.inputs: Tensor = torch.rand(shape)
        self.targets = torch.randint(10, shape[:1])
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self.operations = shape[0] * network.flops_per_sample(shape[1:])

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.network(self.inputs), self.targets).backward()
        self.optimizer.step()

    def time(self, threads: int) -> float:
        """Return the mean seconds of a step with this number of threads."""
        torch.set_num_threads(threads)
        for _ in range(3):
            self()
        steps = 0
        start_time = time.perf_counter()
        while (passed := time.perf_counter() - start_time) < SECONDS:
            self()
            steps += 1
        return passed / steps


def main() -> int:
    """Print the ratios; exit code 1 if all threads together train a short step in far less time than one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each number of threads (default 7)")
    arguments = parser.parse_args()
    failed = False
    print(f"{cores()} threads against one; steps of less than {SHORT:.1g} operations get one")
    for name, (make, shape) in CASES.items():
        step = Step(make(), shape)
        pairs = [(step.time(1), step.time(cores())) for _ in range(arguments.rounds)]
        single = statistics.median(pair[0] for pair in pairs)
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        is_short = step.operations < SHORT
        failed |= is_short and ratio < LIMIT
        kind = f"short; limit {LIMIT}" if is_short else "long"
        print(f"{name:>20}: {step.operations:.1e} operations, {1e3 * single:5.2f} ms, {ratio:.2f} times  ({kind})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
