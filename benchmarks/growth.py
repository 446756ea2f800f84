"""How costs grow with the size of what they depend on; exit code 1 if one grows faster than its limit.

    python benchmarks/growth.py            # everything
    python benchmarks/growth.py cache      # what has this word in its name

Costs are CPU seconds of this process and those that it has started. The exponent is the slope of the line through the
logarithms of costs and sizes: 0 where the cost stays the same, 1 where it grows in proportion.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from many_runs import write_many  # type: ignore[import-not-found] (a file of the tests)

from runner import Callback, ClassificationModel, Trainer
from runner.callbacks import InMemoryLogger, OptimizerMonitor, StateDigest
from runner.callbacks._mlflow.spool import Spool
from runner.callbacks._mlflow.target import make_target, set_environment
from runner.data import TensorLoader
from runner.data.shards.cache import ShardCache
from runner.records.patch import patch


@dataclass(frozen=True)
class Cost:
    """A cost at several sizes."""

    name: str
    of: str
    """What has these sizes."""
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    """Returns the seconds of CPU time at a size."""
    limit: float
    """The largest exponent."""


def cpu_seconds() -> float:
    """Return the CPU time until now, with that of processes that have ended."""
    return sum(os.times()[:4])


def shard_in_cache(files: int, full: bool) -> float:
    """Return the mean CPU seconds to fetch a shard into a cache that `files` shards fill completely or to a tenth."""
    size, shards = 1000, 200
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            Path(folder, f"{number:032x}.shard").write_bytes(bytes(size))
            Path(folder, f"{number:032x}.json").touch()
        cache = ShardCache(folder, files * size * (1 if full else 10) / 1e9)

        def fetch(number: int) -> None:
            cache.get(f"{files + number:032x}", size, lambda path, grow: path.write_bytes(bytes(size)))

        fetch(0)  # finds out how much the files take
        began = cpu_seconds()
        for number in range(1, 1 + shards):
            fetch(number)
        return (cpu_seconds() - began) / shards


def changed_file(megabytes: int) -> float:
    """Return the CPU seconds it takes to record a repository's changes when one file of this size has changed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        file = Path("weights.bin")
        file.write_bytes(os.urandom(megabytes * 1_000_000))
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
            subprocess.run(["git", *who, *command], check=True)
        file.write_bytes(os.urandom(megabytes * 1_000_000))
        began = cpu_seconds()
        patch()
        return cpu_seconds() - began


def table_of_runs(runs: int) -> float:
    """Return the seconds of the command that compares so many runs."""
    with tempfile.TemporaryDirectory() as folder:
        write_many(Path(folder, "outputs"), runs)
        began = cpu_seconds()
        command = [sys.executable, "-m", "runner", "table", "outputs"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return cpu_seconds() - began


class ManyTensors(nn.Module):
    """A network of so many parameters, each of a few numbers."""

    def __init__(self, tensors: int, numbers: int = 8) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((numbers,), 0.01) for _ in range(tensors))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, 2)` for inputs `(N, 2)`."""
        return inputs * torch.stack([part[0] for part in self.parts]).sum()


def make_trainer(folder: str, module: nn.Module, batches: int = 1, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return a trainer of so many batches."""
    return Trainer(
        model=ClassificationModel(module, 2),
        train_dataloader=TensorLoader(torch.rand(batches, 2), torch.zeros(batches).long(), batch_size=1, shuffle=False),
        optimizers=lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        max_duration="1ep",
        callbacks=[*callbacks],
        loggers=[InMemoryLogger()],
        device="cpu",
        run_dir=folder,
    )


class Ends(Callback):
    """Notes the CPU time at the end of each batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        """Note the time."""
        self.times.append(time.process_time())


def step(tensors: int, callback: Callable[[], Callback] | None = None) -> float:
    """Return the CPU seconds of a training step with so many parameters."""
    ends = Ends()
    callbacks = [ends] if callback is None else [callback(), ends]
    with (
        tempfile.TemporaryDirectory() as folder,
        make_trainer(folder, ManyTensors(tensors), 22, callbacks) as trainer,
    ):
        trainer.fit()
    return (ends.times[-1] - ends.times[1]) / 20


def trainer_with(callbacks: int) -> float:
    """Return the CPU seconds it takes to make a trainer with so many callbacks."""
    with tempfile.TemporaryDirectory() as folder:
        watching = [Ends() for _ in range(callbacks)]
        began = cpu_seconds()
        with make_trainer(folder, ManyTensors(1), callbacks=watching):
            return cpu_seconds() - began


def checkpoint(megabytes: int) -> float:
    """Return the CPU seconds of a checkpoint of this size, its weights and Adam's averages."""
    with (
        tempfile.TemporaryDirectory() as folder,
        make_trainer(folder, ManyTensors(16, megabytes * 1_000_000 // (16 * 3 * 4))) as trainer,
    ):
        trainer.fit()
        began = cpu_seconds()
        for number in range(5):
            trainer.save_checkpoint(Path(folder, str(number)))
        return (cpu_seconds() - began) / 5


TENSORS = (100, 500, 2_000)
"""The exponent of a bare step is up to 1.07, as larger steps leave the processor's caches."""


def start_of_sweep(jobs: int) -> float:
    """Return the CPU seconds until the first of so many jobs trains."""
    return sweep(jobs, stop=True)[0]


def job_of_sweep(jobs: int) -> float:
    """Return the mean CPU seconds from the start of a job of one batch to that of the next, of so many jobs."""
    seconds = sweep(jobs, stop=False)
    return (seconds[-1] - seconds[0]) / (jobs - 1)


def sweep(jobs: int, stop: bool) -> list[float]:
    """Return the CPU seconds of a sweep's process at the start of each job; with `stop`, it ends at the first."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own.py").write_text(WATCH)
        training = ("model=mlp", "trainer.max_duration=1ba", "~callbacks.mlflow_logger")
        command = [sys.executable, "-m", "runner", "-m", f"seed=range({jobs})", *training]
        command.append("+callbacks.watch._target_=own.Watch")
        subprocess.run([*command, f"+callbacks.watch.stop={stop}"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [float(line) for line in Path(folder, "seconds").read_text().splitlines()]


WATCH = """
import os, time
from runner import Callback

class Watch(Callback):
    def __init__(self, stop: bool) -> None:
        self.stop = stop

    def fit_start(self, state, logger):
        with open("seconds", "a") as file:
            file.write(f"{time.process_time()}\\n")
        if self.stop:
            os._exit(0)
"""


def write_spool(folder: Path, batches: int, keys: int) -> Spool:
    """Return the spool of a run with so many batches, each with so many metrics."""
    spool = Spool(folder)
    spool.append_metrics([({f"loss/{key}": 0.5 for key in range(keys)}, batch, batch) for batch in range(batches)])
    return spool


def resumed_spool(batches: int) -> float:
    """Return the CPU seconds it takes a run to go on after so many batches, a thousand of them after its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        spool = write_spool(Path(folder), batches, keys=2)
        position = spool.position(batches)
        spool.append_metrics([({"loss/0": 0.5}, batches + number, 1.0) for number in range(1000)])
        spool.close()
        began = time.process_time()
        resumed = Spool(Path(folder))
        resumed.since = position
        resumed.append_metrics([({"loss/0": 0.5}, batches, 1.0)])
        resumed.close()
        return time.process_time() - began


def sent_values(values: int) -> float:
    """Return the CPU seconds it takes to send so many values to a new SQLite store."""
    set_environment()  # before MLflow is imported
    from runner.callbacks._mlflow.delivery import Delivery
    from runner.callbacks._mlflow.store import open_store

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        fields = {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "by_key": True, "experiment_name": "growth"}
        target = make_target({**fields, "run_name": "run"}, {}, [])
        open_store(target["tracking_uri"])
        spool = write_spool(Path(folder, "mlflow"), values // 5, keys=5)
        spool.append({"status": "FINISHED", "t": 1})
        spool.close()
        began = cpu_seconds()
        if not Delivery(Path(folder), target, lambda news: None, live=False).run():
            raise RuntimeError("the store has not all values")
        return cpu_seconds() - began


COSTS = (
    Cost("a step", "tensors", TENSORS, step, 1.2),
    Cost(
        "a step with optimizer_monitor",
        "tensors",
        TENSORS,
        partial(step, callback=lambda: OptimizerMonitor(True, 1)),
        1.2,
    ),
    Cost("a step with state_digest", "tensors", TENSORS, partial(step, callback=lambda: StateDigest("1ba")), 1.2),
    Cost("a trainer", "callbacks", (100, 300, 1_000), trainer_with, 1.1),
    Cost("a checkpoint", "megabytes", (1, 10, 100), checkpoint, 1.05),
    Cost("the start of a sweep", "jobs", (5, 20, 80, 300), start_of_sweep, 0.2),
    Cost("a job of a sweep", "jobs", (5, 20, 80), job_of_sweep, 0.2),
    Cost("the table of runs", "runs", (1_000, 3_000, 10_000), table_of_runs, 1.0),
    Cost("a shard in a cache", "files", (1_000, 4_000, 16_000, 40_000), partial(shard_in_cache, full=False), 0.3),
    Cost("the patch beside a changed file", "megabytes", (1, 10, 100), changed_file, 0.5),
    Cost("going on with a spool", "batches", (3_000, 30_000, 300_000), resumed_spool, 0.2),
    Cost("sending to MLflow", "values", (5_000, 20_000, 80_000), sent_values, 1.05),
    Cost("a shard in a full cache", "files", (1_000, 4_000, 16_000, 40_000), partial(shard_in_cache, full=True), 0.3),
)


def exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the slope of the line through the logarithms."""
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(seconds), 1)[0])


def main(arguments: list[str]) -> int:
    """Print the table, and return whether a cost grows too fast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names of costs (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median counts")
    options = parser.parse_args(arguments)
    failed = False
    for cost in COSTS:
        if options.words and not any(word in cost.name for word in options.words):
            continue
        seconds = [statistics.median(cost.measure(size) for _ in range(options.rounds)) for size in cost.sizes]
        grows = exponent(cost.sizes, seconds)
        too_fast = grows > cost.limit
        failed |= too_fast
        print(f"{cost.name}: exponent {grows:.2f} (limit {cost.limit:g}){'  TOO FAST' * too_fast}")
        for size, value in zip(cost.sizes, seconds, strict=True):
            print(f"{size:>12,} {cost.of}: {1e3 * value:10.3f} ms", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
