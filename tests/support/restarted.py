"""Commands whose training is disturbed by failures of the machine, and the results that they leave."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from outcomes import logged

OWN = '''
import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path

import torch

from runner import Callback, get_global_rank
from runner.data import DatasetLoader


class Noisy:
    """Random samples, different in each epoch; reading the sample `deadly` kills the process that reads it."""

    def __init__(self, deadly):
        self.deadly = deadly

    def __len__(self):
        return 90

    def __getitem__(self, index):
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(64) + index % 10, index % 10


def read(num_workers: int = 2, deadly: int = -1):
    train = DatasetLoader(Noisy(deadly), 6, shuffle=True, num_workers=num_workers)
    return train, DatasetLoader(Noisy(-1), 6, shuffle=False)


class Strikes(Callback):
    """Causes a failure of some kind at an event of one batch on one rank, a number of times, in the run of one seed."""

    def __init__(self, kind: str, event: str = "before_forward", batch: int = 5, times: int = 1, seed: int = 0,
                 rank: int = 0):
        self.kind, self.batch, self.times, self.seed, self.rank = kind, batch, times, seed, rank
        setattr(self, event, self.strike)

    def strike(self, state, logger):
        file = Path(f"strikes-{state.rank_zero_seed}")
        count = len(file.read_text()) if file.exists() else 0
        is_due = (state.timestamp.batch, state.rank_zero_seed, get_global_rank()) == (self.batch, self.seed, self.rank)
        if not is_due or count >= self.times:
            return
        file.write_text("x" * (count + 1))
        if self.kind == "worker":
            worker = min(active_children(), key=lambda child: child.pid)
            worker.kill()
            worker.join()
        elif self.kind == "rank":
            state.loss.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        elif self.kind in ("file", "signal"):
            if self.kind == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
            with open("/dev/full", "w") as full:
                full.write("no space left")
        else:
            raise ValueError("an error in the user's code")


class Full(Callback):
    """Fills a disk after 21 batches, and frees it when the run begins again, as an administrator would."""

    def __init__(self, disk: str):
        self.filler = Path(disk, "filler")

    def fit_start(self, state, logger):
        self.filler.unlink(missing_ok=True)

    def batch_end(self, state, logger):
        if state.timestamp.batch == 21 and not Path("filled").exists():
            Path("filled").touch()
            try:
                with self.filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
            except OSError:
                pass
'''
SHORT = (
    *("model=mlp", "model.module.dropout=0.2", "model.num_classes=10", "data=noisy", "algorithms=none"),
    *("trainer.max_duration=2ep", "callbacks=[checkpoint_saver,json_lines_logger]", "trainer.eval_interval=7ba"),
    *("callbacks.checkpoint_saver.save_interval=4ba", "+callbacks.strikes._target_=own.Strikes"),
)
BATCHES = 30


class Left(NamedTuple):
    """The results that a run left in its folder."""

    weights: dict[str, torch.Tensor]
    values: list[dict[str, Any]]


def prepare(folder: Path) -> None:
    """Write the user's module and its config."""
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "own.py").write_text(OWN)
    (folder / "conf" / "data" / "noisy.yaml").write_text("_target_: own.read\nnum_workers: 2\ndeadly: -1\n")


def strikes(kind: str, **arguments: object) -> list[str]:
    """Return the overrides that set the arguments of `Strikes`."""
    return [f"+callbacks.strikes.{key}={value}" for key, value in {"kind": kind, **arguments}.items()]


def left_in(run_dir: Path) -> Left:
    """Return the results in a run's folder, and assert that no value was logged twice."""
    weights = torch.load(run_dir / "checkpoints" / "latest" / "model.pt", weights_only=True)
    values = [entry for entry in logged(run_dir) if "key" in entry and not re.match("time|memory", entry["key"])]
    points = [(entry["step"], entry["key"]) for entry in values]
    assert len({*points}) == len(points) > BATCHES
    return Left(weights, values)


def assert_equal(left: Left, whole: Left) -> None:
    """Assert that the results of two runs are bit-identical."""
    torch.testing.assert_close(left.weights, whole.weights, rtol=0, atol=0)
    assert left.values == whole.values


def restarts(stderr: str) -> list[str]:
    """Return the message about each restart on stderr."""
    return re.findall(r"^WARNING: .*\b(restart \d+ of .*)$", stderr, re.MULTILINE)
