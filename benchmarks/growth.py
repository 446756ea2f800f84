"""Measure how costs grow with size. Exits with code 1 if a cost grows faster than its limit.

    python benchmarks/growth.py            # all costs
    python benchmarks/growth.py cache      # costs with this word in their name

A cost is the CPU time of this process and of the processes it starts, measured at several sizes. Its exponent is the
slope of a line fitted to log(cost) over log(size): 0 for a constant cost, 1 for a cost proportional to the size.
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

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from many_runs import write_many  # type: ignore[import-not-found] (a file of the tests)

from runner import Callback, ClassificationModel, Trainer
from runner.callbacks import InMemoryLogger, OptimizerMonitor, StateDigest
from runner.callbacks._mlflow.spool import Spool
from runner.callbacks._mlflow.target import make_target, set_environment
from runner.data import TensorLoader
from runner.data.shards.cache import ShardCache
from runner.records.patch import patch

# Large networks do not fit into the caches of the processor, so the exponent of a bare step is up to 1.07.
TENSORS = (100, 500, 2_000)
STEPS = 20  # training steps that are timed, after two warm-up steps
CHECKPOINTS = 5  # checkpoints that are saved and timed
FILES = (1_000, 4_000, 16_000, 40_000)
SHARD_SIZE = 1000  # bytes
FETCHED = 200  # shards that are fetched into the cache and timed
RETRAINED = 1000  # batches in a spool after the checkpoint from which a run is resumed
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
"""A callback that records the CPU time at the start of each job."""


@dataclass(frozen=True)
class Cost:
    """A cost measured at several sizes."""

    name: str
    unit: str
    """Unit of the sizes."""
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    """Returns the CPU seconds at a size."""
    limit: float
    """The largest exponent allowed."""


def cpu_seconds() -> float:
    """Return the CPU time used so far, including that of child processes that have ended."""
    return sum(os.times()[:4])


def shard_in_cache(files: int, full: bool) -> float:
    """Return the mean CPU seconds to fetch a shard into a cache of `files` shards, which is full or a tenth full."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            Path(folder, f"{number:032x}.shard").write_bytes(bytes(SHARD_SIZE))
            Path(folder, f"{number:032x}.json").touch()
        cache = ShardCache(folder, files * SHARD_SIZE * (1 if full else 10) / 1e9)

        def fetch(number: int) -> None:
            cache.get(f"{files + number:032x}", SHARD_SIZE, lambda path, grow: path.write_bytes(bytes(SHARD_SIZE)))

        fetch(0)  # not timed, because the cache adds up the sizes of its files the first time
        start_time = cpu_seconds()
        for number in range(1, 1 + FETCHED):
            fetch(number)
        return (cpu_seconds() - start_time) / FETCHED


def changed_file(megabytes: int) -> float:
    """Return the CPU seconds to record the changes in a repository in which one file of this size has changed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        file = Path("weights.bin")
        file.write_bytes(os.urandom(megabytes * 1_000_000))
        author = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
            subprocess.run(["git", *author, *command], check=True)
        file.write_bytes(os.urandom(megabytes * 1_000_000))
        start_time = cpu_seconds()
        patch()
        return cpu_seconds() - start_time


def table_of_runs(runs: int) -> float:
    """Return the CPU seconds to print a table of this many runs."""
    with tempfile.TemporaryDirectory() as folder:
        write_many(Path(folder, "outputs"), runs)
        start_time = cpu_seconds()
        command = [sys.executable, "-m", "runner", "table", "outputs"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return cpu_seconds() - start_time


class ManyTensors(nn.Module):
    """A network with many parameters, each of a few numbers."""

    def __init__(self, tensors: int, numbers: int = 8) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.full((numbers,), 0.01) for _ in range(tensors))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, 2)` for inputs `(N, 2)`."""
        return inputs * torch.stack([part[0] for part in self.parts]).sum()


def make_trainer(folder: str, module: nn.Module, batches: int = 1, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return a trainer for one epoch of this many batches."""
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


class BatchTimes(Callback):
    """Records the CPU time at the end of each batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        """Record the time."""
        self.times.append(time.process_time())


def step(tensors: int, callback: Callable[[], Callback] | None = None) -> float:
    """Return the mean CPU seconds of a training step with this many parameters."""
    batches = BatchTimes()
    callbacks = [batches] if callback is None else [callback(), batches]
    with (
        tempfile.TemporaryDirectory() as folder,
        make_trainer(folder, ManyTensors(tensors), 2 + STEPS, callbacks) as trainer,
    ):
        trainer.fit()
    return (batches.times[-1] - batches.times[1]) / STEPS


def trainer_with(callbacks: int) -> float:
    """Return the CPU seconds to make a trainer with this many callbacks."""
    with tempfile.TemporaryDirectory() as folder:
        watching = [BatchTimes() for _ in range(callbacks)]
        start_time = cpu_seconds()
        with make_trainer(folder, ManyTensors(1), callbacks=watching):
            return cpu_seconds() - start_time


def checkpoint(megabytes: int) -> float:
    """Return the mean CPU seconds to save a checkpoint of this size, which holds weights and both moments of AdamW."""
    with (
        tempfile.TemporaryDirectory() as folder,
        make_trainer(folder, ManyTensors(16, megabytes * 1_000_000 // (16 * 3 * 4))) as trainer,
    ):
        trainer.fit()
        start_time = cpu_seconds()
        for number in range(CHECKPOINTS):
            trainer.save_checkpoint(Path(folder, str(number)))
        return (cpu_seconds() - start_time) / CHECKPOINTS


def start_of_sweep(jobs: int) -> float:
    """Return the CPU seconds until a sweep of this many jobs begins to train its first job."""
    return sweep(jobs, stop=True)[0]


def job_of_sweep(jobs: int) -> float:
    """Return the mean CPU seconds of a job that trains one batch, in a sweep of this many jobs."""
    seconds = sweep(jobs, stop=False)
    return (seconds[-1] - seconds[0]) / (jobs - 1)


def sweep(jobs: int, stop: bool) -> list[float]:
    """Return the CPU seconds of a sweep at the start of each job; with `stop`, the sweep exits at the first one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own.py").write_text(WATCH)
        training = ("model=mlp", "trainer.max_duration=1ba", "~callbacks.mlflow_logger")
        command = [sys.executable, "-m", "runner", "-m", f"seed=range({jobs})", *training]
        command.append("+callbacks.watch._target_=own.Watch")
        subprocess.run([*command, f"+callbacks.watch.stop={stop}"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return [float(line) for line in Path(folder, "seconds").read_text().splitlines()]


def write_spool(folder: Path, batches: int, keys: int) -> Spool:
    """Return the spool of a run of this many batches, each with this many metrics."""
    spool = Spool(folder)
    spool.append_metrics([({f"loss/{key}": 0.5 for key in range(keys)}, batch, batch) for batch in range(batches)])
    return spool


def resumed_spool(batches: int) -> float:
    """Return the CPU seconds to log the first batch of a run resumed from a checkpoint after this many batches."""
    with tempfile.TemporaryDirectory() as folder:
        spool = write_spool(Path(folder), batches, keys=2)
        position = spool.position(batches)
        spool.append_metrics([({"loss/0": 0.5}, batches + number, 1.0) for number in range(RETRAINED)])
        spool.close()
        start_time = time.process_time()
        resumed = Spool(Path(folder), since=position)
        resumed.append_metrics([({"loss/0": 0.5}, batches, 1.0)])
        resumed.close()
        return time.process_time() - start_time


def sent_values(values: int) -> float:
    """Return the CPU seconds to send this many values to a new SQLite store."""
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
        start_time = cpu_seconds()
        if not Delivery(Path(folder), target, lambda news: None, live=False).run():
            raise RuntimeError("not all values were sent to the store")
        return cpu_seconds() - start_time


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
    Cost("a shard in a cache", "files", FILES, partial(shard_in_cache, full=False), 0.3),
    Cost("the patch of a changed file", "megabytes", (1, 10, 100), changed_file, 0.5),
    Cost("resuming with a spool", "batches", (3_000, 30_000, 300_000), resumed_spool, 0.2),
    Cost("sending to MLflow", "values", (5_000, 20_000, 80_000), sent_values, 1.05),
    Cost("a shard in a full cache", "files", FILES, partial(shard_in_cache, full=True), 0.3),
)


def exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the slope of the line fitted to log(seconds) over log(size)."""
    return float(numpy.polyfit(numpy.log(sizes), numpy.log(seconds), 1)[0])


def main(arguments: list[str]) -> int:
    """Print all costs, and return exit code 1 if one grows too fast, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only costs with these words in their names (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements at each size, of which the median is taken")
    options = parser.parse_args(arguments)
    failed = False
    for cost in COSTS:
        if options.words and not any(word in cost.name for word in options.words):
            continue
        seconds = [statistics.median(cost.measure(size) for _ in range(options.rounds)) for size in cost.sizes]
        slope = exponent(cost.sizes, seconds)
        too_fast = slope > cost.limit
        failed |= too_fast
        print(f"{cost.name}: exponent {slope:.2f} (limit {cost.limit:g}){'  TOO FAST' * too_fast}")
        for size, value in zip(cost.sizes, seconds, strict=True):
            print(f"{size:>12,} {cost.unit}: {1e3 * value:10.3f} ms", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
