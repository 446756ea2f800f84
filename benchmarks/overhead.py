"""Compare the time of a step in the trainer with a hand-written loop that does the same work in the same run.

    python benchmarks/overhead.py           # the trainer without callbacks, with the default ones, with all
    python benchmarks/overhead.py --each    # what each callback adds

An MLP 64-32-10 at batch 32 with one thread is small enough to show every microsecond of the engine. Both sides read the
same ready-made batches through a plain DataLoader over a list, which measures the engine. Then both read an epoch of
the same data in a new order: the trainer through our loader, the hand-written loop by indexing.

The variants take turns, many short rounds each, measured by process CPU time (which includes the logger's thread). The
ratio to the hand-written loop is computed for each round; the output is the median ratio and its quartiles. Inputs are
vectors, so callbacks for images or text are idle.

Most callbacks take the same time in any step, so a limit on the ratio applies to one machine: ours were set where the
hand-written step takes 0.2 ms. The limit of all callbacks together is tight: much of their time is lost because many
small pieces of code take turns and evict each other from the processor's caches, more so on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import runner.callbacks as shipped
from runner import Callback, ClassificationModel, Logger, State, Trainer
from runner.data.loaders import TensorLoader

BATCH, FEATURES, CLASSES, BATCHES = 32, 64, 10, 400
LIMITS = {
    "no callbacks": 1.05,
    "ten callbacks": 1.08,
    "loss and throughput": 1.10,
    "all built-ins": 1.20,
    "every callback": 1.35,
    "our loader": 1.05,
}
BUILT_INS = ("MLflowLogger", "CheckpointSaver", "LearningCurves", "ProgressBar", "ConsoleSummary", "SpeedMonitor")
LEFT_OUT = {
    "LoadCheckpoint": "acts before training, and needs a checkpoint",
    "SampleLedger": "needs a loader whose order is known",
    "SweepPruner": "needs a sweep",
    "ExportForInference": "acts after training",
    "WandBLogger": "works in a thread of wandb, which the clock here does not wait for",
    "EventTrace": "measures other callbacks, which adds half a microsecond to each of their calls",
    "TorchProfiler": "measures other callbacks, in a few batches",
}


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return one epoch of samples: inputs (N, 64) and targets (N,)."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * BATCHES, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (BATCH * BATCHES,), generator=generator)


def make_module() -> nn.Module:
    """Return the MLP, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class PlainModel(ClassificationModel):
    """A classifier without training metrics, like the hand-written loop."""

    def metrics(self, train: bool) -> dict:
        """Return no metrics."""
        return {}


HOOKS = (
    "epoch_start",
    "before_dataloader",
    "after_dataloader",
    "batch_start",
    "before_forward",
    "after_loss",
    "after_backward",
    "after_train_batch",
    "batch_end",
    "batch_checkpoint",
)


def ten_callbacks() -> list[Callback]:
    """Return ten callbacks, each overriding one hook."""

    def hook(self: Callback, state: object, logger: object) -> None:
        return None

    return [type(f"Watch_{name}", (Callback,), {name: hook})() for name in HOOKS]


def ready_batches() -> DataLoader:
    """Return a loader of ready-made batches."""
    batches: Any = [*zip(*(tensor.split(BATCH) for tensor in make_data()), strict=True)]
    return DataLoader(batches, batch_size=None)


class Indexed:
    """Batches selected by plain indexing, in a new order each epoch."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_data()
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of an epoch."""
        order = torch.randperm(len(self.inputs), generator=self.generator)
        for index in order.split(BATCH):
            yield self.inputs[index], self.targets[index]


def hand_written(batches: Iterable[Any]) -> Callable[[], float]:
    """Return a function that trains an epoch in a carefully hand-written loop, and returns the CPU seconds."""
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def epoch() -> float:
        start_time = time.process_time()
        for inputs, targets in batches:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(module(inputs), targets)
            loss.backward()
            optimizer.step()
        return time.process_time() - start_time

    return epoch


class Clock(Callback):
    """Measures the seconds from the start to the end of an epoch, including the delivery of all logged values.

    Work that a run does once at its end (a last checkpoint, a picture) is not a cost of a step and does not count.
    The clock stops training after the epoch, so that no callback takes its last batch for the last one of the run.

    Args:
        timer: returns seconds, by default the CPU time of the process.
    """

    def __init__(self, timer: Callable[[], float] = time.process_time) -> None:
        self.timer = timer
        self.start_time = self.seconds = 0.0

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Start."""
        self.start_time = self.timer()

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Stop, once everything logged has reached its destinations."""
        logger.flush()
        self.seconds = self.timer() - self.start_time
        state.stop_training()


def with_trainer(
    callbacks: list[Callback], folder: Path, batches: Iterable[Any]
) -> tuple[Trainer, Callable[[], float]]:
    """Return a Trainer for the same work, and a function that trains an epoch and returns its CPU seconds."""
    clock = Clock()
    inputs, targets = (tensor[:BATCH] for tensor in make_data())
    trainer = Trainer(
        model=PlainModel(make_module(), CLASSES),
        train_dataloader=batches,
        # For callbacks that watch an evaluation, which comes after the clock has stopped.
        eval_dataloader=TensorLoader(inputs, targets, batch_size=BATCH, shuffle=False),
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=[*callbacks, clock],
        device="cpu",
        run_dir=folder,
    )

    def epoch() -> float:
        trainer.fit(duration="1000ep")
        return clock.seconds

    return trainer, epoch


def make(name: str, folder: Path) -> Callback:
    """Return a built-in callback by its class name, with default arguments, or with some that do not end the run."""
    arguments: dict[str, dict[str, Any]] = {
        "EarlyStopper": {"monitor": "loss", "patience": "1000ep"},
        "Generate": {"prompts": ["def "]},
        "MLPerfCallback": {"root_folder": "mlperf", "index": 0, "metric_name": "loss", "target": 0.0},
        "MLflowLogger": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "ThresholdStopper": {"monitor": "loss", "threshold": 0.0},
    }
    return getattr(shipped, name)(**arguments.get(name, {}))


def measure(
    sets: dict[str, list[Callback]], folder: Path, rounds: int, by_hand: Iterable[Any], batches: Iterable[Any]
) -> dict[str, list[float]]:
    """Return the CPU seconds of a step in each round, for the hand-written loop and for each set of callbacks.

    Args:
        sets: the callbacks of each trainer.
        folder: an empty folder.
        rounds: number of measurements of each.
        by_hand: batches of the hand-written loop.
        batches: batches of the trainers.
    """
    times: dict[str, list[float]] = {}
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.ExitStack() as stack:
        variants = {"hand-written": hand_written(by_hand)}
        for key, callbacks in sets.items():
            trainer, variants[key] = with_trainer(callbacks, folder / key.replace(" ", "-"), batches)
            stack.enter_context(trainer)
        for round_number in range(rounds + 2):
            for key, epoch in variants.items():
                seconds = epoch()
                if round_number >= 2:
                    times.setdefault(key, []).append(seconds / BATCHES)
    return times


def print_ratios(times: dict[str, list[float]], limits: Mapping[str, float] = LIMITS) -> bool:
    """Print the ratio of each set to the hand-written loop; return whether one is over its limit."""
    base = times.pop("hand-written")
    print(f"hand-written loop: {1e6 * statistics.median(base):.0f} us a step, torch {torch.__version__}, one thread")
    failed = False
    for key, values in times.items():
        ratios = sorted(value / hand for value, hand in zip(values, base, strict=True))
        low, median, high = statistics.quantiles(ratios, n=4)
        failed |= median > limits[key]
        more = 1e6 * statistics.median(value - hand for value, hand in zip(values, base, strict=True))
        limit = f"limit {limits[key]:.2f}"
        print(f"{key:>19}: {median:.3f} times, {more:3.0f} us more  (quartiles {low:.3f} to {high:.3f}; {limit})")
    return failed


def print_each(times: dict[str, list[float]]) -> None:
    """Print what each callback adds to a run whose only other callback is a destination for all values."""
    base, _ = times.pop("InMemoryLogger"), times.pop("hand-written")
    print(f"a run with InMemoryLogger: {1e6 * statistics.median(base):.0f} us a step; more with:")
    for key, values in times.items():
        more = [1e6 * (value - plain) for value, plain in zip(values, base, strict=True)]
        low, median, high = statistics.quantiles(more, n=4)
        print(f"{key:>20}: {median:5.1f} us  (quartiles {low:.1f} to {high:.1f})")


def main() -> int:
    """Print the ratios; exit code 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="rounds of 400 steps per variant (default 25)")
    parser.add_argument("--skip-built-ins", action="store_true", help="measure only the engine and bare callbacks")
    parser.add_argument("--each", nargs="*", metavar="CLASS", help="print what each callback adds, or only these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("runner").setLevel(logging.ERROR)
    names = [name for name in shipped.__all__ if name not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.each is not None:
            chosen = arguments.each or [name for name in names if name != "InMemoryLogger"]
            sets = {name: [make(name, folder), make("InMemoryLogger", folder)] for name in chosen}
            sets = {"InMemoryLogger": [make("InMemoryLogger", folder)], **sets}
            print_each(measure(sets, folder, arguments.rounds, ready_batches(), ready_batches()))
            return 0
        logged = [make(name, folder) for name in ("InMemoryLogger", "SpeedMonitor")]
        sets = {"no callbacks": [], "ten callbacks": ten_callbacks(), "loss and throughput": logged}
        if not arguments.skip_built_ins:
            sets["all built-ins"] = [make(name, folder) for name in BUILT_INS]
            sets["every callback"] = [make(name, folder) for name in names]
        engine = measure(sets, folder, arguments.rounds, ready_batches(), ready_batches())
        ours = TensorLoader(*make_data(), batch_size=BATCH, shuffle=True)
        loader = measure({"our loader": []}, folder, arguments.rounds, Indexed(), ours)
        return int(print_ratios(engine) | print_ratios(loader))


if __name__ == "__main__":
    sys.exit(main())
