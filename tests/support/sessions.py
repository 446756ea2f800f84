"""Training sessions that tests run in separate processes and may kill at any moment."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise the first optimizer step imports it, which takes a second
from hydra import compose
from torch import nn

from runner import Callback, ClassificationModel, Trainer, get_global_rank, get_world_size
from runner.algorithms import EMA, MixUp
from runner.callbacks import CheckpointSaver, EarlyStopper, JSONLinesLogger
from runner.checkpoints.files import find_checkpoint
from runner.config.build import build
from runner.config.composed import to_plain
from runner.config.composing import initialized
from runner.config.experiment import Experiment
from runner.data import TensorLoader
from runner.data.images.digits import load_digits
from runner.optim.schedulers import cosine_annealing

CONF = Path(__file__).resolve().parents[2] / "conf"
BATCH_SIZE = 149

torch.set_num_threads(1)
ClassificationModel(nn.Identity(), 10).metrics(train=True)  # imports torchmetrics


class Kills(Callback):
    """Kills its process with a signal the first time that an event fires at a batch.

    Args:
        event: value of the event.
        batch: number of batches trained when it fires.
        number: number of the signal.
        rank: rank whose process gets the signal; None means all ranks.
    """

    def __init__(self, event: str, batch: int, number: int = signal.SIGKILL, rank: int | None = None) -> None:
        self.event, self.batch, self.number, self.rank = event, batch, number, rank
        self.sent = False

    def run_event(self, event, state, logger):
        is_due = event.value == self.event and state.timestamp.batch == self.batch
        if is_due and not self.sent and self.rank in (None, get_global_rank()):
            self.sent = True
            if state.timestamp.batch % 2:  # at even batches, chance decides how much of the log is on disk
                logger.flush()
            os.kill(os.getpid(), self.number)


class Events(Callback):
    """Records each event with its batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fired: dict[tuple[str, int], None] = {}

    def run_event(self, event, state, logger):
        self.fired[event.value, int(state.timestamp.batch)] = None

    def close(self, state, logger):
        self.path.write_text(json.dumps([*self.fired]))


class SampleIds(Callback):
    """Appends a line per batch: its number, the number of ranks, and the numbers of this rank's samples."""

    def fit_start(self, state, logger):
        self.file = (state.run_dir / f"ids{get_global_rank()}.jsonl").open("a", buffering=1)

    def after_train_batch(self, state, logger):
        ids = [] if state.batch_is_padding else state.batch[2].tolist()
        self.file.write(json.dumps([state.timestamp.batch, get_world_size(), ids]) + "\n")


@functools.cache
def digits() -> tuple[torch.Tensor, ...]:
    """Return images and labels for training and for evaluation."""
    train, evaluation = load_digits()
    return *train.tensors, *evaluation.tensors


def make_trainer(
    run_dir: Path,
    *callbacks: Callback,
    chance: bool = True,
    save_interval: str = "3ba",
    asynchronous: bool = False,
    transform: Callable[[Any], Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a trainer for three epochs, each of seven full batches and a small one; an EarlyStopper ends them early.

    Args:
        run_dir: the run's folder; training resumes from its newest checkpoint, if it has one.
        *callbacks: additional callbacks.
        chance: whether to use dropout, MixUp and batch norm, which depend on the number of ranks. Without them the
            model is in float64, and the last batch of an epoch has one sample, so that a second rank gets none.
        save_interval: interval between checkpoints.
        asynchronous: whether checkpoints are written in the background.
        transform: transform of the training batches.
        **arguments: arguments of the Trainer, which replace those set here.
    """
    images, labels, eval_images, eval_labels = digits()
    samples = 7 * BATCH_SIZE + (7 if chance else 1)
    data = (images[:samples], labels[:samples], torch.arange(samples))
    torch.manual_seed(0)
    if chance:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 10))
    else:
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double()
        data, eval_images = (data[0].double(), *data[1:]), eval_images.double()
    # A resumed run must not depend on the random state of its process.
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    defaults: dict[str, Any] = {
        "model": ClassificationModel(net, 10),
        "train_dataloader": TensorLoader(*data, batch_size=BATCH_SIZE, shuffle=True, seed=1, transform=transform),
        "eval_dataloader": TensorLoader(eval_images[:201], eval_labels[:201], batch_size=100, shuffle=False),
        "optimizers": lambda params: torch.optim.AdamW(params, lr=0.05),
        "schedulers": cosine_annealing(t_warmup="3ba"),
        "algorithms": [*([MixUp(alpha=0.4)] if chance else []), EMA("2ba")],
        "callbacks": [
            EarlyStopper("loss", min_delta=0.3, patience="7ba"),
            SampleIds(),
            CheckpointSaver(save_interval, asynchronous=asynchronous),
            *callbacks,
        ],
        "loggers": [JSONLinesLogger()],
        "max_duration": "3ep",
        "eval_interval": "4ba",
        "device": "cpu",
        "run_dir": run_dir,
        "resume_path": newest(run_dir),
    }
    return Trainer(**(defaults | arguments))


def newest(run_dir: Path) -> Path | None:
    """Return the path of a run's newest complete checkpoint, or None if it has no checkpoint."""
    try:
        return find_checkpoint(run_dir)
    except FileNotFoundError:
        return None


def fit(run_dir: Path, kill: dict[str, Any] | None = None, **arguments: Any) -> None:
    """Train to the end, or until `Kills(**kill)` strikes; resume from the folder's checkpoint, if it has one.

    The outcome is saved in `outcome.pt`, for the parent process to compare.
    """
    kills = [Kills(**kill)] if kill is not None else []
    with make_trainer(run_dir, *kills, **arguments) as trainer:
        trainer.fit(may_be_over=True)
    if get_global_rank() == 0:
        torch.save(outcome(trainer), run_dir / "outcome.pt")


def train_config(run_dir: Path, overrides: list[str]) -> None:
    """Train the experiment of `conf/` and overrides; resume from the folder's checkpoint, if it has one."""
    os.chdir(run_dir.parent)
    warnings.simplefilter("ignore")  # some hooks use libraries that warn
    with initialized(CONF):
        experiment = Experiment(to_plain(compose("config", overrides)))
    checkpoint = newest(run_dir)
    with build(experiment, run_dir, "run", None if checkpoint is None else str(checkpoint)) as trainer:
        trainer.fit(may_be_over=True)
    state = trainer.state
    values = {"weights": dict(state.unwrapped_model.state_dict()), "optimizer": state.optimizers[0].state_dict()}
    torch.save(values, run_dir / "outcome.pt")


class Trouble(Callback):
    """Fills the disk, or makes it read-only, before the checkpoint of batch 6, and repairs it after that of batch 9.

    Args:
        kind: 'full' or 'read-only'.
        disk: mount point of the disk.
    """

    def __init__(self, kind: str, disk: Path) -> None:
        self.kind, self.disk = kind, disk

    def batch_end(self, state, logger):
        if state.timestamp.batch not in (5, 10):
            return
        is_start = state.timestamp.batch == 5
        if self.kind == "read-only":
            subprocess.run(["mount", "-o", f"remount,{'ro' if is_start else 'rw'}", self.disk], check=True)
        elif is_start:
            with contextlib.suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
            os.truncate(self.disk / "filler", (self.disk / "filler").stat().st_size - (1 << 14))  # leave 16 KiB free
        else:
            (self.disk / "filler").unlink()


def fit_in_trouble(run_dir: Path, kind: str, disk: Path, kill: dict[str, Any]) -> None:
    """Train on a disk that is full or read-only for a while, until `Kills(**kill)` strikes."""
    with make_trainer(run_dir, Trouble(kind, disk), Kills(**kill)) as trainer:
        trainer.fit()


class Pause(Callback):
    """Slows down each batch, so that ranks agree on a signal within a few batches."""

    def before_train_batch(self, state, logger):
        time.sleep(0.2)


def send_once(number: int) -> Callable[[int], None]:
    """Return `send(nth)`, whose nth call, counted from 1, sends this process a signal and sleeps a little."""
    calls = itertools.count(1)

    def send(nth: int) -> None:
        if next(calls) == nth:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    return send


def interrupt(run_dir: Path, place: str, number: int, rank: int | None = None) -> None:
    """Train until a signal is sent to all ranks or to one of them.

    Args:
        run_dir: the run's folder.
        place: what the run is doing when the signal comes: 'data' (reading the sixth batch), 'forward' (of the sixth
            batch), 'evaluation' (its second, after eight batches) or 'save' (its second, after six batches).
        number: number of the signal.
        rank: rank that gets the signal; None means all ranks.
    """
    hooks: list[Callback] = [Pause()] if get_world_size() > 1 else []
    arguments: dict[str, Any] = {}
    send = send_once(number)
    if rank in (None, get_global_rank()):
        if place == "data":

            def read(batch: Any) -> Any:
                send(6)
                return batch

            arguments["transform"] = read
        elif place == "save":
            fsync = os.fsync

            def sync(descriptor: int) -> None:
                send(7)  # the first checkpoint syncs its two files, its manifest, and two folders
                fsync(descriptor)

            os.fsync = sync
        else:
            event, batch = {"forward": ("after_forward", 5), "evaluation": ("eval_after_forward", 8)}[place]
            hooks.append(Kills(event, batch, number))
    with make_trainer(run_dir, *hooks, **arguments) as trainer:
        trainer.fit()


def list_events(run_dir: Path) -> None:
    """Train to the end, and save all events in `events.json`."""
    with make_trainer(run_dir, Events(run_dir / "events.json")) as trainer:
        trainer.fit()


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return the final state of a run, without times."""
    state = trainer.state
    return {
        "weights": dict(state.unwrapped_model.state_dict()),
        "optimizer": state.optimizers[0].state_dict(),
        "algorithms": {algorithm.config_key: algorithm.state_dict() for algorithm in state.algorithms},
        "metrics": {label: dict(values) for label, values in state.metric_values.items()},
        "stopper": next(callback.state_dict() for callback in state.callbacks if isinstance(callback, EarlyStopper)),
        "counts": state.timestamp._replace(total_wct=0.0, epoch_wct=0.0, batch_wct=0.0)._asdict(),
        "stopped": state.stop_requested,
    }


class Saves(Callback):
    """Records the progress of training, and after each save checks that no files of a killed session are left."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.saves = 0

    def fit_start(self, state, logger):
        self.progress = (state.run_dir / "progress").open("a", buffering=1)

    def batch_end(self, state, logger):
        self.progress.write(f"{state.timestamp.batch}\n")

    def batch_checkpoint(self, state, logger):
        self.saves += 1
        hidden = {path.name for path in (state.run_dir / "checkpoints").glob(".*")}
        if self.asynchronous:  # this session may still be writing its own temporary files
            hidden = {name for name in hidden if not name.endswith((f"-{os.getpid()}", ".link"))}
        if hidden and self.saves > self.asynchronous:
            raise RuntimeError(f"files of a killed session were not deleted: {hidden}")


def save_each_batch(run_dir: Path, max_duration: str = "100000ba", save: bool = True) -> None:
    """Train with an evaluation and a checkpoint after each batch, which take most of the time.

    Args:
        run_dir: the run's folder; checkpoints are written in the background if its name says so.
        max_duration: length of the training.
        save: whether to save checkpoints.
    """
    asynchronous = run_dir.name == "asynchronous"
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(64, 64, generator=generator), torch.arange(64) % 10
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.2), nn.Linear(128, 10))
    saver = CheckpointSaver("1ba", keep=2, monitor="loss", asynchronous=asynchronous)
    with Trainer(
        model=ClassificationModel(net, 10),
        train_dataloader=TensorLoader(images, labels, batch_size=16, shuffle=True),
        eval_dataloader=TensorLoader(images, labels, batch_size=64, shuffle=False),
        optimizers=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        max_duration=max_duration,
        eval_interval="1ba",
        callbacks=[saver, Saves(asynchronous)] if save else [],
        device="cpu",
        run_dir=run_dir,
        resume_path=newest(run_dir),
    ) as trainer:
        trainer.fit()
    values = {"weights": dict(net.state_dict()), "optimizer": trainer.state.optimizers[0].state_dict()}
    torch.save(values, run_dir / "outcome.pt")
