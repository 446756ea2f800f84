"""Commands that the machine harms while they train, and what they leave."""

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
    """Samples that are drawn anew in each epoch; one may kill whoever reads it."""

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
    """Does harm at an event of one batch, a number of times, for one seed."""

    def __init__(self, kind: str, event: str = "before_forward", batch: int = 5, times: int = 1, seed: int = 0,
                 rank: int = 0):
        self.kind, self.batch, self.times, self.seed, self.rank = kind, batch, times, seed, rank
        setattr(self, event, self.strike)

    def strike(self, state, logger):
        file = Path(f"strikes-{state.rank_zero_seed}")
        done = len(file.read_text()) if file.exists() else 0
        here = (state.timestamp.batch, state.rank_zero_seed, get_global_rank()) == (self.batch, self.seed, self.rank)
        if not here or done >= self.times:
            return
        file.write_text("x" * (done + 1))
        if self.kind == "worker":
            worker = min(active_children(), key=lambda one: one.pid)
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
            raise ValueError("of the user")


class Full(Callback):
    """Fills a disk after 21 batches; before the run begins again, somebody makes room."""

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
    """The files and values of a run."""

    weights: dict[str, torch.Tensor]
    values: list[dict[str, Any]]


def prepare(folder: Path) -> None:
    """Write what a user wrote."""
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "own.py").write_text(OWN)
    (folder / "conf" / "data" / "noisy.yaml").write_text("_target_: own.read\nnum_workers: 2\ndeadly: -1\n")


def strikes(kind: str, **given: object) -> list[str]:
    """The arguments that do harm."""
    return [f"+callbacks.strikes.{key}={value}" for key, value in {"kind": kind, **given}.items()]


def left_in(run_dir: Path) -> Left:
    """The contents of a run's folder; no value was logged twice."""
    weights = torch.load(run_dir / "checkpoints" / "latest" / "model.pt", weights_only=True)
    values = [one for one in logged(run_dir) if "key" in one and not re.match("time|memory", one["key"])]
    places = [(one["step"], one["key"]) for one in values]
    assert len({*places}) == len(places) > BATCHES
    return Left(weights, values)


def assert_equal(left: Left, whole: Left) -> None:
    """Two runs left the same, to the last bit."""
    torch.testing.assert_close(left.weights, whole.weights, rtol=0, atol=0)
    assert left.values == whole.values


def restarts(stderr: str) -> list[str]:
    """The message about each restart."""
    return re.findall(r"^WARNING: .*\b(restart \d+ of .*)$", stderr, re.MULTILINE)
