"""Compare training, evaluation and prediction on several ranks with hand-written loops.

    python benchmarks/ranks.py                # an MLP for digits, and a small GPT: about two minutes
    python benchmarks/ranks.py --clock cpu    # the same by CPU time, for a busy machine
    python benchmarks/ranks.py --ranks 4      # two by default

Processes of one thread each average gradients over gloo and read ready-made batches from a list. A careful loop with
torch's DistributedDataParallel and the trainer take turns, many short rounds each, by the clock of rank 0. The ratio is
computed for each round; the output is the median ratio and its quartiles. In an evaluation, both sides average the loss
over all samples; in a prediction, both keep the outputs. The time that `Trainer.eval` and `Trainer.predict` take at
their start and end counts too. Finally, both sides must have bit-identical weights and outputs, and the same loss.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import operations
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _ranks import Results, start
from overhead import Clock, print_ratios
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from runner import LanguageModel, Trainer, get_global_rank, get_world_size
from runner.models import GPT, MLP

KINDS = ("training", "evaluation", "prediction")
LIMITS: dict[str, float] = dict.fromkeys(KINDS, 1.02)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Batches(list[tuple[Tensor, ...]]):
    """Ready-made batches."""

    equal_targets = True  # as the hand-written loop assumes, see `runner.data.loaders.OrderedLoader`

    @property
    def sampler(self) -> SimpleNamespace:
        """Declare, like a `DistributedSampler`, that each rank reads the same number of samples, and different ones."""
        return SimpleNamespace(num_replicas=get_world_size(), rank=get_global_rank())


@dataclass(frozen=True)
class Task(operations.Task):
    """A network with its loss, and this rank's samples for a round."""

    trained: int
    """Samples in a training batch, on each rank."""
    evaluated: int
    """Samples in a batch for evaluation or prediction, on each rank."""

    def batches(self, size: int) -> Batches:
        """Return the samples of a round in batches of `size` samples."""
        return Batches(zip(*(tensor.split(size) for tensor in self.data()), strict=True))


def make_digits() -> tuple[Tensor, Tensor]:
    """Return samples shaped like digits: images `(N, 64)` and classes `(N,)`."""
    generator = torch.Generator().manual_seed(get_global_rank())
    return torch.rand(4800, 64, generator=generator), torch.randint(10, (4800,), generator=generator)


def make_windows() -> tuple[Tensor, Tensor]:
    """Return windows of bytes, and the windows one byte later, each `(N, 128)`."""
    tokens = torch.randint(256, (480, 129), generator=torch.Generator().manual_seed(get_global_rank()))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TASKS = {
    "digits": Task(
        lambda: MLP(64, (128, 128), 10),
        operations.CLASSIFIER,
        make_digits,
        F.cross_entropy,
        trained=32,
        evaluated=300,
    ),
    "gpt": Task(
        lambda: GPT(256, context=128, d_model=64, n_layers=2, n_heads=4),
        LanguageModel,
        make_windows,
        operations.loss_of_tokens,
        trained=4,
        evaluated=32,
    ),
}
"""Sizes are those of `model=mlp data=digits` and `model=gpt data=stdlib_text` on two ranks."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both loops."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class ByHand:
    """Carefully hand-written loops."""

    def __init__(self, task: Task) -> None:
        self.loss_of = task.loss
        self.module = operations.make_module(task)
        self.replica = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.optimizer = sgd(self.module.parameters())

    def train(self, batches: Batches) -> None:
        """Train on the batches."""
        for inputs, targets in batches:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss_of(self.replica(inputs), targets)
            loss.backward()
            self.optimizer.step()

    def evaluate(self, batches: Batches) -> Tensor:
        """Return the mean loss over the batches of all ranks."""
        total = torch.zeros((), dtype=torch.float64)
        samples = 0
        self.module.eval()
        with torch.no_grad():
            for inputs, targets in batches:
                total += self.loss_of(self.module(inputs), targets) * len(inputs)
                samples += len(inputs)
        self.module.train()
        sums = torch.stack([total, total.new_tensor(samples)])
        dist.all_reduce(sums)
        return sums[0] / sums[1]

    def predict(self, batches: Batches) -> list[Tensor]:
        """Return the outputs for the batches."""
        self.module.eval()
        with torch.no_grad():
            outputs = [self.module(inputs) for inputs, _ in batches]
        self.module.train()
        return outputs


def measure(name: str, rounds: int, timer: Callable[[], float] = time.perf_counter) -> Results:
    """Return the seconds of a batch in each round, by hand and with the Trainer, for each of `KINDS`. All ranks."""
    logging.getLogger("runner").setLevel(logging.ERROR)
    task = TASKS[name]
    trained = task.batches(task.trained)
    evaluated = task.batches(task.evaluated)
    hand = ByHand(task)
    clock = Clock(timer)
    model = task.wrap(operations.make_module(task))
    vars(model)["metrics"] = lambda train: {}  # the hand-written loops have none
    with Trainer(
        model=model,
        train_dataloader=trained,
        eval_dataloader=evaluated,
        eval_interval=0,
        optimizers=sgd,
        callbacks=[clock],
        device="cpu",
        run_dir="run",
    ) as trainer:

        def timed(function: Callable[..., Any], *arguments: Any) -> float:
            dist.barrier()
            start_time = timer()
            function(*arguments)
            return timer() - start_time

        def train() -> float:
            dist.barrier()
            trainer.fit(duration="1ep")
            return clock.seconds

        runs: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            "training": (partial(timed, hand.train, trained), train),
            "evaluation": (partial(timed, hand.evaluate, evaluated), partial(timed, trainer.eval)),
            "prediction": (partial(timed, hand.predict, evaluated), partial(timed, trainer.predict, evaluated)),
        }
        results: Results = {kind: {"hand-written": [], kind: []} for kind in KINDS}
        for number in range(rounds + 1):
            for kind, sides in runs.items():
                for times, run in zip(results[kind].values(), sides, strict=True):
                    seconds = run() / len(trained if kind == "training" else evaluated)
                    if number:  # the first round warms up
                        times.append(seconds)
        check(hand, trainer, evaluated)
    return results


def check(hand: ByHand, trainer: Trainer, batches: Batches) -> None:
    """Check that both sides did the same work. All ranks.

    Raises:
        AssertionError: weights or outputs differ, or losses differ in more than the last digits.
    """
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    same([*trainer.state.unwrapped_model.parameters()], [*hand.module.parameters()])
    same(trainer.predict(batches), hand.predict(batches))
    torch.testing.assert_close(trainer.eval()["eval"]["loss"].double(), hand.evaluate(batches), rtol=1e-6, atol=0)


def main() -> int:
    """Print the ratios; exit code 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="counted rounds of each kind (default 25)")
    parser.add_argument("--tasks", nargs="*", default=[*TASKS], choices=TASKS, help="networks to train")
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="wall-clock time, or CPU time of a rank")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = False
    for name in arguments.tasks:
        with tempfile.TemporaryDirectory() as folder:
            measured = partial(measure, name, arguments.rounds, CLOCKS[arguments.clock])
            results = start(measured, arguments.ranks, Path(folder))
        print(f"\n{name} on {arguments.ranks} ranks, {arguments.clock} clock", flush=True)
        for kind in KINDS:
            failed |= print_ratios(results[kind], LIMITS)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
