"""Count the operations and Python calls of a training step, in the trainer and in a hand-written loop.

    python benchmarks/operations.py             # an MLP, ResNet-18 and GPT: by hand, and with loss and metrics logged
    python benchmarks/operations.py --each      # also what each callback and each algorithm adds to a step

Counts are means over some steps, of: operations on tensors (each is at least one kernel on a GPU; views and allocations
do not count); tensors copied from the host, and their bytes; values read back, for which the host waits; and calls of
Python functions. A dispatch mode of torch sees the operations, including those of the backward pass and the optimizer.
Values that the logger's thread reads back do not count. On a CPU nothing is copied to a device; instead, tensors made
from Python's numbers count, which would be copied from memory that is not pinned.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import runner.algorithms
import runner.callbacks
from runner import Algorithm, Callback, ClassificationModel, LanguageModel, Model, Trainer
from runner.data import TensorLoader
from runner.models import GPT, MLP, ResNet18

BATCH = 8
WATCHED = range(4, 10)  # batches whose operations are counted
CALLED = range(12, 18)  # batches whose calls of Python functions are counted
BATCHES = 20  # in an epoch

READS = {"aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten.masked_select"}
READS |= {"aten._unique2", "aten.unique_consecutive", "aten.unique_dim", "aten.repeat_interleave", "aten.bincount"}
METHODS = {"tolist", "item", "numpy", "cpu", "cuda", "pin_memory", "__array__", "__bool__", "__float__", "__int__"}
ALLOCATES = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}


@dataclass
class Counts:
    """Counts over all watched steps; `row` divides them by the number of steps."""

    operations: Counter[str] = field(default_factory=Counter)
    """Operations that work on a device, by name."""
    reads: Counter[str] = field(default_factory=Counter)
    """Operations and methods whose result the host waits for, by name."""
    copies: Counter[str] = field(default_factory=Counter)
    """Tensors copied from the host, by the kind of its memory: 'pinned' or 'pageable'."""
    copied: int = 0
    """Bytes of these tensors."""
    calls: int = 0
    """Calls of Python functions."""

    def row(self) -> list[float]:
        """Return the numbers for a step: operations, copies, their bytes, reads, calls."""
        totals = (self.operations.total(), self.copies.total(), self.copied, self.reads.total())
        return [*(total / len(WATCHED) for total in totals), self.calls / len(CALLED)]


class Operations(TorchDispatchMode):
    """Counts operations of this thread."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and run it."""
        name = str(func.overloadpacket)
        result = func(*args, **(kwargs or {}))
        source = args[1] if name == "aten.copy_" else args[0] if name in ("aten._to_copy", "aten.lift_fresh") else None
        crosses = source is not None and source.device != result.device
        if name in READS or (crosses and result.is_cpu):
            self.counts.reads[name] += 1
        elif source is not None and (crosses or name == "aten.lift_fresh"):
            self.counts.copies["pinned" if source.is_pinned() else "pageable"] += 1
            self.counts.copied += source.nbytes
        elif not func.is_view and name not in ALLOCATES and func.namespace != "profiler":
            self.counts.operations[name] += 1
        return result


class Methods(TorchFunctionMode):
    """Counts methods that read values, some of which are not operations on the CPU."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a method, and call it."""
        name = getattr(func, "__name__", "")
        if name in METHODS and args and isinstance(args[0], Tensor):
            self.counts.reads[name] += 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Counts operations and calls of this thread in some batches of an epoch.

    Args:
        watched: batches whose operations are counted.
        called: batches whose calls of Python functions are counted; None: no batches.
    """

    def __init__(self, watched: range = WATCHED, called: range | None = CALLED) -> None:
        self.counts = Counts()
        self._watched = watched
        self._called = called
        self._modes = Operations(self.counts), Methods(self.counts)

    def before_batch(self, number: int) -> None:
        """Start or stop counting; call it with the number of each batch, before the batch is read."""
        if number == self._watched.start:
            for mode in self._modes:
                mode.__enter__()
        elif number == self._watched.stop:
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)
        elif self._called is not None and number in (self._called.start, self._called.stop):
            is_first = number == self._called.start
            (gc.disable if is_first else gc.enable)()  # a collection would call finalizers of other objects
            sys.setprofile(self._count_call if is_first else None)

    def _count_call(self, frame: Any, event: str, argument: Any) -> None:
        self.counts.calls += event == "call"


class Watching(Callback):
    """Calls a `Watch` before each batch of a run."""

    def __init__(self, watch: Watch):
        self.watch = watch

    def before_dataloader(self, state: Any, logger: Any) -> None:
        """Pass on the number of the next batch."""
        self.watch.before_batch(state.timestamp.batch)


@dataclass(frozen=True)
class Task:
    """A network with its data, and its loss for the hand-written loop."""

    module: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], Model]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def make_images(*shape: int) -> tuple[Tensor, Tensor]:
    """Return inputs in [0, 1] of a shape, and classes from 0 to 9, for all batches of an epoch."""
    samples = BATCHES * BATCH
    return torch.rand(samples, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(samples) % 10


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (BATCHES * BATCH, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits `(N, T, V)` and tokens `(N, T)`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


CLASSIFIER = partial(ClassificationModel, num_classes=10)
TASKS = {
    "mlp": Task(
        lambda: MLP(64, (32,), 10),
        CLASSIFIER,
        lambda: make_images(64),
        F.cross_entropy,
    ),
    "resnet18": Task(
        lambda: ResNet18(3, 10),
        CLASSIFIER,
        lambda: make_images(3, 8, 8),
        F.cross_entropy,
    ),
    "gpt": Task(lambda: GPT(64, context=16, d_model=16, n_layers=6, n_heads=2), LanguageModel, _tokens, loss_of_tokens),
}


def make_module(task: Task) -> nn.Module:
    """Return the network of a task, with the same weights each time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return task.module()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both loops."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True)


def by_hand(task: Task, device: str = "cpu") -> Counts:
    """Return the counts of a hand-written loop, which computes no metrics and logs nothing."""
    module = make_module(task).to(device)
    optimizer = sgd(module.parameters())
    inputs, targets = (tensor.to(device) for tensor in task.data())
    watch = Watch()
    order = torch.randperm(len(inputs), device=device)
    for number, index in enumerate(order.split(BATCH)):
        watch.before_batch(number)
        optimizer.zero_grad()
        loss = task.loss(module(inputs[index]), targets[index])
        loss.backward()
        optimizer.step()
    return watch.counts


def with_trainer(
    task: Task,
    run_dir: Path,
    callbacks: Sequence[Callback] = (),
    algorithms: Sequence[Algorithm] = (),
    device: str = "cpu",
    **arguments: Any,
) -> Counts:
    """Return the counts of the Trainer, which logs all its values."""
    watch = Watch()
    torch.manual_seed(0)
    data = task.data()
    with Trainer(
        model=task.wrap(make_module(task)),
        train_dataloader=TensorLoader(*data, batch_size=BATCH, shuffle=True),
        eval_dataloader=TensorLoader(*(tensor[:BATCH] for tensor in data), batch_size=BATCH, shuffle=False),
        optimizers=sgd,
        callbacks=[Watching(watch), *callbacks],
        loggers=[runner.callbacks.InMemoryLogger()],
        algorithms=algorithms,
        device=device,
        run_dir=run_dir,
        **arguments,
    ) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.batch == BATCHES
    return watch.counts


# Arguments that a callback or algorithm requires, or without which it would do nothing in such a short run.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ALiBi": {"max_sequence_length": 16},
    **{name: {"mean": 0.0, "std": 1.0} for name in ("AugMix", "RandAugment", "TrivialAugment")},
    "EarlyStopper": {"monitor": "loss", "patience": "1000ep"},
    "EMA": {"half_life": "10ba"},
    "Generate": {"prompts": ["def "]},
    "GhostBatchNorm": {"ghost_batch_size": 4},
    "MLPerfCallback": {"root_folder": "mlperf", "index": 0, "metric_name": "loss", "target": 0.0},
    "SWA": {"update_interval": "1ba", "start": "1ba"},
    "SelectiveBackprop": {"start": 0.0, "end": 1.0},
    "StochasticDepth": {"target_block": "BasicBlock"},
    "ThresholdStopper": {"monitor": "loss", "threshold": 0.0},
}
LEFT_OUT = {
    "ExportForInference": "acts after training",
    "InMemoryLogger": "is in each run",
    "LoadCheckpoint": "acts before training",
    "EventTrace": "measures other callbacks",
    "TorchProfiler": "measures other callbacks",
    "WandBLogger": "needs an account",
    "MLPerfCallback": "needs mlperf_logging",
    "TensorBoardLogger": "needs tensorboard",
    "SweepPruner": "needs a sweep",
    "Compile": "changes what an operation is",
    "CUDAGraph": "needs a GPU",
    "Float8": "needs a GPU",
    "CudnnBenchmark": "needs a GPU",
    "DDP": "does nothing in a single process",
    "ReduceOnPlateau": "acts after evaluations",
    "NoOpModel": "trains nothing",
}


def additions(name: str, kind: Any, folder: Path, device: str = "cpu") -> Iterator[tuple[str, list[float]]]:
    """Yield each task that a callback or algorithm supports, with its additions to the counts of a step.

    Args:
        name: its class name.
        kind: `runner.callbacks` or `runner.algorithms`.
        folder: an empty folder.
        device: the device for training.
    """
    key = "callbacks" if kind is runner.callbacks else "algorithms"
    for title, task in TASKS.items():
        plain = with_trainer(task, folder / "plain", device=device).row()
        arguments = (
            {"tracking_uri": f"sqlite:///{folder}/mlflow.db"} if name == "MLflowLogger" else ARGUMENTS.get(name, {})
        )
        try:
            plug_in = getattr(kind, name)(**arguments)
            counts = with_trainer(task, folder / f"{name}-{title}", device=device, **{key: [plug_in]})
        except (TypeError, ValueError):
            continue  # it does not support this network
        yield title, [after - before for after, before in zip(counts.row(), plain, strict=True)]


HEADER = f"{'':34}{'operations':>11}{'copies':>8}{'bytes':>9}{'reads':>7}{'calls':>8}"


def print_row(title: str, row: Iterable[float], sign: str = "") -> None:
    """Print a line of the table."""
    operations, copies, size, reads, calls = row
    print(f"{title:34}{operations:{sign}11.1f}{copies:{sign}8.1f}{size:{sign}9.0f}{reads:{sign}7.1f}{calls:{sign}8.0f}")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names_by_kind = {
        kind: [name for name in kind.__all__ if name not in LEFT_OUT] for kind in (runner.callbacks, runner.algorithms)
    }
    parser.add_argument(
        "--each",
        nargs="*",
        choices=[*chain(*names_by_kind.values())],
        metavar="CLASS",
        help="also print what each callback and algorithm adds, or only these",
    )
    parser.add_argument("--device", default="cpu", help="device for training (default cpu)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("runner").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        print(f"a step on {arguments.device}, torch {torch.__version__}")
        print(HEADER)
        for title, task in TASKS.items():
            by_hand_row = by_hand(task, arguments.device).row()
            trainer_row = with_trainer(task, Path(folder), device=arguments.device).row()
            print_row(f"{title} by hand", by_hand_row)
            more = [after - before for after, before in zip(trainer_row, by_hand_row, strict=True)]
            print_row("  with the Trainer, more", more, "+")
        if arguments.each is None:
            return 0
        print("\nmore with")
        for kind, names in names_by_kind.items():
            for name in names:
                if arguments.each and name not in arguments.each:
                    continue
                quiet = io.StringIO()
                with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                    rows = [*additions(name, kind, Path(folder), arguments.device)]
                for title, row in rows:
                    print_row(f"{name}, {title}", row, "+")
    return 0


if __name__ == "__main__":
    sys.exit(main())
