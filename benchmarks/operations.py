"""What a training step asks of the device and of Python, by counting: the trainer against a loop written by hand.

    python benchmarks/operations.py             # an MLP, ResNet-18 and GPT: by hand, and with loss and metrics logged
    python benchmarks/operations.py --each      # and what each callback and each algorithm adds to a step

Counted are, as a mean over some steps: operations that work on tensors (each is at least one kernel on a GPU; views and
allocations are none), tensors that cross from the host with their bytes, values read back, for which the host waits,
and calls of Python functions. One of torch's dispatch modes sees the operations, those of the backward pass and of the
optimizer too. What the logger's thread reads back is not of the step. On a CPU nothing crosses to a device; there, what
counts as a copy is a tensor made from Python's numbers, which would have to cross, from memory that is not pinned.
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
    """What was asked for in the steps watched; divided by their number where it is printed."""

    operations: Counter[str] = field(default_factory=Counter)
    """Operations with work for a device, by name."""
    reads: Counter[str] = field(default_factory=Counter)
    """Operations and methods whose result the host waits for, by name."""
    copies: Counter[str] = field(default_factory=Counter)
    """Tensors that cross from the host, by the memory they come from: 'pinned' or 'pageable'."""
    copied: int = 0
    """Their bytes."""
    calls: int = 0
    """Calls of Python functions, in as many steps."""

    def row(self) -> list[float]:
        """Return what a step takes: operations, copies, their bytes, reads, calls."""
        seen = (self.operations.total(), self.copies.total(), self.copied, self.reads.total())
        return [*(one / len(WATCHED) for one in seen), self.calls / len(CALLED)]


class Operations(TorchDispatchMode):
    """Counts operations of this thread."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and do it."""
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
    """Counts methods that read values, some of which are no operations on the CPU."""

    def __init__(self, counts: Counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and call it."""
        name = getattr(func, "__name__", "")
        if name in METHODS and args and isinstance(args[0], Tensor):
            self.counts.reads[name] += 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Counts what this thread does in some batches of an epoch.

    Args:
        watched: batches whose operations are counted.
        called: batches whose calls of Python functions are counted; None: of none.
    """

    def __init__(self, watched: range = WATCHED, called: range | None = CALLED) -> None:
        self.counts = Counts()
        self._watched = watched
        self._called = called
        self._modes = Operations(self.counts), Methods(self.counts)

    def before_batch(self, number: int) -> None:
        """Start or stop; call it before each batch is read, with its number."""
        if number == self._watched.start:
            for mode in self._modes:
                mode.__enter__()
        elif number == self._watched.stop:
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)
        elif self._called is not None and number in (self._called.start, self._called.stop):
            begins = number == self._called.start
            (gc.disable if begins else gc.enable)()  # a collection would call finalizers of other objects
            sys.setprofile(self._count_call if begins else None)

    def _count_call(self, frame: Any, event: str, argument: Any) -> None:
        self.counts.calls += event == "call"


class Watching(Callback):
    """Tells a `Watch` of each batch of a run."""

    def __init__(self, watch: Watch):
        self.watch = watch

    def before_dataloader(self, state: Any, logger: Any) -> None:
        """Pass on the number of the batch that is about to be read."""
        self.watch.before_batch(state.timestamp.batch)


@dataclass(frozen=True)
class Task:
    """A network with its data, and its loss as one would write it by hand."""

    module: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], Model]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def make_images(*shape: int) -> tuple[Tensor, Tensor]:
    """Return inputs of a shape, in [0, 1], with class numbers from 0 to 9: all batches of an epoch."""
    samples = BATCHES * BATCH
    return torch.rand(samples, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(samples) % 10


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (BATCHES * BATCH, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits `(N, T, V)` and tokens `(N, T)`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


TASKS = {
    "mlp": Task(
        lambda: MLP(64, (32,), 10), lambda one: ClassificationModel(one, 10), lambda: make_images(64), F.cross_entropy
    ),
    "resnet18": Task(
        lambda: ResNet18(3, 10), lambda one: ClassificationModel(one, 10), lambda: make_images(3, 8, 8), F.cross_entropy
    ),
    "gpt": Task(lambda: GPT(64, context=16, d_model=16, n_layers=6, n_heads=2), LanguageModel, _tokens, loss_of_tokens),
}


def make_module(task: Task) -> nn.Module:
    """Return a task's network, the same weights each time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return task.module()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both sides."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True)


def by_hand(task: Task, device: str = "cpu") -> Counts:
    """Return what a loop by hand takes, which computes no metrics and logs nothing."""
    module = make_module(task).to(device)
    optimizer = sgd(module.parameters())
    inputs, targets = (one.to(device) for one in task.data())
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
    """Return what the Trainer takes, with all its own values logged."""
    watch = Watch()
    torch.manual_seed(0)
    data = task.data()
    with Trainer(
        model=task.wrap(make_module(task)),
        train_dataloader=TensorLoader(*data, batch_size=BATCH, shuffle=True),
        eval_dataloader=TensorLoader(*(one[:BATCH] for one in data), batch_size=BATCH, shuffle=False),
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


# Arguments without which a callback or algorithm cannot be made, or would do nothing in a run as short as this.
GIVEN: dict[str, dict[str, Any]] = {
    "ALiBi": {"max_sequence_length": 16},
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
    "EventTrace": "measures the others",
    "TorchProfiler": "measures the others",
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
    """Yield each task that a callback or algorithm fits, with what it adds to a step.

    Args:
        name: its class name.
        kind: `runner.callbacks` or `runner.algorithms`.
        folder: an empty folder.
        device: where the runs are.
    """
    key = "callbacks" if kind is runner.callbacks else "algorithms"
    for title, task in TASKS.items():
        without = with_trainer(task, folder / "plain", device=device).row()
        given = {"tracking_uri": f"sqlite:///{folder}/mlflow.db"} if name == "MLflowLogger" else GIVEN.get(name, {})
        try:
            one = getattr(kind, name)(**given)
            counts = with_trainer(task, folder / f"{name}-{title}", device=device, **{key: [one]})
        except (TypeError, ValueError):
            continue  # it is for other networks, and says so
        yield title, [more - before for more, before in zip(counts.row(), without, strict=True)]


HEADER = f"{'':34}{'operations':>11}{'copies':>8}{'bytes':>9}{'reads':>7}{'calls':>8}"


def print_row(title: str, row: Iterable[float], sign: str = "") -> None:
    """Print a line of the table."""
    operations, copies, size, reads, calls = row
    print(f"{title:34}{operations:{sign}11.1f}{copies:{sign}8.1f}{size:{sign}9.0f}{reads:{sign}7.1f}{calls:{sign}8.0f}")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {
        kind: [one for one in kind.__all__ if one not in LEFT_OUT] for kind in (runner.callbacks, runner.algorithms)
    }
    parser.add_argument(
        "--each",
        nargs="*",
        choices=[*chain(*known.values())],
        metavar="CLASS",
        help="what each callback and algorithm adds, or these",
    )
    parser.add_argument("--device", default="cpu", help="where to train (default cpu)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("runner").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        print(f"a step on {arguments.device}, torch {torch.__version__}")
        print(HEADER)
        for title, task in TASKS.items():
            hand = by_hand(task, arguments.device).row()
            ours = with_trainer(task, Path(folder), device=arguments.device).row()
            print_row(f"{title} by hand", hand)
            print_row("  with the Trainer, more", [more - before for more, before in zip(ours, hand, strict=True)], "+")
        if arguments.each is None:
            return 0
        print("\nmore with")
        for kind, names in known.items():
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
