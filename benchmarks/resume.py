"""Measure how long a run takes to resume from a checkpoint, and how long training stands still during a save.

    python benchmarks/resume.py

Resuming: one epoch of 2 * 10^7 samples in batches of 16, resumed at batch 10, 10^3, 10^5 and 10^6. The output shows the
time from building the Trainer to the end of the first batch, for data in memory and for two worker processes, and its
ratio to the time at batch 10. The order of the epoch is drawn each time, which takes the same time at any batch.

Saving: a model of 50 million parameters with its momentum. The output shows the pauses of a synchronous and of an
asynchronous save, and the ratio of the latter to the time of a plain copy of the same tensors. All figures are medians
of runs that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from runner import Callback, ClassificationModel, Logger, State, Trainer
from runner.callbacks import CheckpointSaver
from runner.checkpoints.snapshot import save_checkpoint
from runner.data import DatasetLoader, TensorLoader

SAMPLES, BATCH, BATCHES = 20_000_000, 16, (10, 1_000, 100_000, 1_000_000)
RESUME_LIMIT = 1.5
COPY_LIMIT = 2.0


class Numbers:
    """A data set whose samples are made from their indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), index / SAMPLES), index % 2


class FirstBatch(Callback):
    """Stops after one batch, and records its index and when it ended."""

    def __init__(self) -> None:
        self.batch = -1
        self.ended = 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        """Stop."""
        self.batch = state.timestamp.batch - 1
        self.ended = time.perf_counter()
        state.stop_requested = True


def make_trainer(
    module: nn.Module, loader: TensorLoader | DatasetLoader, folder: Path, *callbacks: Callback, **options
) -> Trainer:
    """Return a Trainer for a classifier, with SGD and momentum."""
    return Trainer(
        model=ClassificationModel(module, 2),
        train_dataloader=loader,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        callbacks=callbacks,
        device="cpu",
        run_dir=folder,
        **options,
    )


def write_checkpoints(folder: Path, loader: TensorLoader | DatasetLoader) -> dict[int, Path]:
    """Write checkpoints, and return them by their batch."""
    paths = {batch: folder / f"ba{batch}" for batch in BATCHES}
    with make_trainer(nn.Linear(4, 2), loader, folder / "first", FirstBatch()) as trainer:
        trainer.fit()
        first = trainer.state.timestamp.state_dict()
        for batch, path in paths.items():
            samples = batch * BATCH
            position = first | {"batch": batch, "batch_in_epoch": batch, "sample": samples, "sample_in_epoch": samples}
            trainer.state.timestamp = trainer.state.timestamp.from_state_dict(position)
            save_checkpoint(trainer.state, path)
    return paths


def time_resume(path: Path, batch: int, make_loader: Callable[[], TensorLoader | DatasetLoader], folder: Path) -> float:
    """Return the seconds from building a Trainer to the end of its first batch."""
    loader, callback = make_loader(), FirstBatch()
    start_time = time.perf_counter()
    with make_trainer(nn.Linear(4, 2), loader, folder / "resumed", callback, resume_path=path) as trainer:
        trainer.fit()
    assert callback.batch == batch
    return callback.ended - start_time


def measure_resume(folder: Path, rounds: int) -> bool:
    """Print the times to the first batch; return whether their ratio is within the limit."""
    tensors = torch.rand(SAMPLES, 4), torch.arange(SAMPLES) % 2
    loaders: dict[str, Callable[[], TensorLoader | DatasetLoader]] = {
        "in memory": lambda: TensorLoader(*tensors, batch_size=BATCH, shuffle=True),
        "two workers": lambda: DatasetLoader(Numbers(), BATCH, shuffle=True, num_workers=2),
    }
    paths = write_checkpoints(folder, loaders["in memory"]())
    is_within = True
    for name, make_loader in loaders.items():
        times: dict[int, list[float]] = {batch: [] for batch in BATCHES}
        for turn in range(rounds + 1):
            for batch, path in paths.items():
                seconds = time_resume(path, batch, make_loader, folder)
                if turn:
                    times[batch].append(seconds)
        medians = {batch: statistics.median(values) for batch, values in times.items()}
        for batch, seconds in medians.items():
            print(f"{name:>12}, resumed at batch {batch:>9,}: {seconds:.2f} s to the end of the first batch")
        ratio = max(medians.values()) / medians[BATCHES[0]]
        is_within &= ratio <= RESUME_LIMIT
        print(f"{name:>12}, slowest to first: {ratio:.2f} times  (limit {RESUME_LIMIT:.2f})")
    return is_within


def measure_save(folder: Path, rounds: int) -> bool:
    """Print the pauses of saves; return whether the asynchronous one is within the limit."""
    module = nn.Sequential(nn.Linear(4, 7000), nn.Linear(7000, 7000), nn.Linear(7000, 2))
    loader = TensorLoader(torch.rand(64, 4), torch.arange(64) % 2, batch_size=16, shuffle=True)
    with make_trainer(module, loader, folder / "large", FirstBatch(), max_duration="1000ep") as trainer:
        trainer.fit()
        trainer.state.stop_requested = False  # as between two batches
        state, logger = trainer.state, trainer.logger
        tensors = [*module.parameters()]
        tensors += [entry["momentum_buffer"] for entry in state.optimizers[0].state.values()]
        savers = {
            name: CheckpointSaver("1ba", folder=name, keep=1, asynchronous=name == "asynchronous save")
            for name in ("synchronous save", "asynchronous save")
        }
        for saver in savers.values():
            saver.fit_start(state, logger)
        times: dict[str, list[float]] = {"plain copy": [], **{name: [] for name in savers}}
        for turn in range(rounds + 1):
            start_time = time.perf_counter()
            copies = [tensor.detach().clone() for tensor in tensors]
            elapsed = {"plain copy": time.perf_counter() - start_time}
            del copies
            for name, saver in savers.items():
                state.step_time(state.timestamp.to_next_batch(16, 0, 0.0))
                start_time = time.perf_counter()
                saver.batch_checkpoint(state, logger)
                elapsed[name] = time.perf_counter() - start_time
                saver.close(state, logger)  # waits for the write, so that it does not slow down other measurements
                assert saver.latest is not None
            for name, seconds in elapsed.items():
                if turn:
                    times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{sum(tensor.nbytes for tensor in tensors) / 2**20:.0f} MiB of weights and momentum; training stands still:")
    for name, seconds in medians.items():
        print(f"{name:>18}: {1e3 * seconds:.0f} ms")
    ratio = medians["asynchronous save"] / medians["plain copy"]
    print(f"{'to a plain copy':>18}: {ratio:.2f} times  (limit {COPY_LIMIT:.2f})")
    return ratio <= COPY_LIMIT


def main() -> int:
    """Print all figures; exit code 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="counted runs of each kind, after a warm-up run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        resumes_fast = measure_resume(Path(name), arguments.rounds)
        saves_fast = measure_save(Path(name), arguments.rounds)
    return int(not (resumes_fast and saves_fast))


if __name__ == "__main__":
    sys.exit(main())
