"""Runs in which many intervals are watched, and when each of them is due by hand arithmetic."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from runner import Callback, ClassificationModel, Trainer
from runner.data import TensorLoader
from runner.time import Interval

SAMPLES, BATCH, TOKENS = 11, 3, 5
SIZES = [3, 3, 3, 2]  # of the batches of an epoch
UNITS = ("ep", "ba", "sp", "tok", "dur")


class Counted(ClassificationModel):
    """Has tokens, which a run and intervals may count."""

    def num_tokens(self, batch: Any) -> int:
        return TOKENS * len(batch[1])


class Unsized(TensorLoader):
    """Does not say how long it is."""

    __len__ = None  # type: ignore[assignment]


class Watch(Callback):
    """Notes when each interval is due: its batch, and whether that was when the epoch had ended."""

    def __init__(self, intervals: list[str]) -> None:
        self.intervals = {text: Interval(text) for text in intervals}
        self.seen: dict[str, list[tuple[int, bool]]] = {text: [] for text in intervals}

    def batch_end(self, state, logger):
        self._look(state, False)

    def epoch_end(self, state, logger):
        self._look(state, True)

    def _look(self, state, has_ended):
        for text, interval in self.intervals.items():
            if state.is_due(interval):
                self.seen[text].append((state.timestamp.batch, has_ended))

    def state_dict(self):
        return {"seen": {text: [list(one) for one in seen] for text, seen in self.seen.items()}}

    def load_state_dict(self, state):
        self.seen = {text: [(batch, ended) for batch, ended in seen] for text, seen in state["seen"].items()}


class Plan(NamedTuple):
    """A run's length, the intervals to watch, and whether its loader has a length."""

    max_duration: str
    intervals: list[str]
    sized: bool
    cut: int
    """Batches after which the run is stopped and resumed."""


def draw(seed: int) -> Plan:
    """Return a plan of at most six epochs, with intervals in every unit."""
    rng = random.Random(seed)
    per_epoch = {"ep": 1, "ba": len(SIZES), "sp": SAMPLES, "tok": TOKENS * SAMPLES}
    unit = rng.choice([*per_epoch])
    value = rng.randint(2, 6) if unit == "ep" else rng.randint(2 * per_epoch[unit], 6 * per_epoch[unit])
    intervals = []
    for counted, most in (("ep", 3), ("ba", 9), ("sp", 25), ("tok", 100)):
        intervals.append(f"{rng.randint(1, most)}{counted}")
    intervals += [f"{rng.choice(['0.1', '0.07', '0.25', '0.333', '0.5', '1', str(rng.randint(1, 99) / 100)])}dur"]
    return Plan(f"{value}{unit}", intervals, rng.random() < 0.6, rng.randint(1, len(SIZES) + 2))


def train(plan: Plan, folder: Path, resumed: bool) -> dict[str, list[tuple[int, bool]]]:
    """Return when each interval was due in a run, at once or in two parts. All ranks."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) % 2

    def run(**arguments: Any) -> Watch:
        watch = Watch(plan.intervals)
        kind = TensorLoader if plan.sized else Unsized
        with Trainer(
            model=Counted(nn.Linear(4, 2), 2),
            train_dataloader=kind(inputs, targets, batch_size=BATCH, shuffle=True),
            optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            callbacks=[watch, *arguments.pop("callbacks", [])],
            max_duration=plan.max_duration,
            device="cpu",
            run_dir=folder,
            **arguments,
        ) as trainer:
            trainer.fit()
        return watch

    if not resumed:
        return run().seen
    run(callbacks=[Cut(plan.cut, folder / "cut")])
    return run(resume_path=folder / "cut").seen


class Cut(Callback):
    """Saves a checkpoint after so many batches, and stops."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def batch_checkpoint(self, state, logger):
        from runner import save_checkpoint

        if state.timestamp.batch == self.batch:
            save_checkpoint(state, self.path)
            state.stop_training()


def by_hand(plan: Plan, text: str) -> list[tuple[int, bool]]:
    """Return when an interval is due: at the first step of time that reaches each multiple of it.

    Steps are batches and ends of epochs. What counts epochs, or a fraction of a number of them that is whole, is
    reached by an epoch's end; a fraction of epochs of unknown length is seen there at the earliest.
    """
    length, last = _split(plan.max_duration)
    period, unit = _split(text)
    if unit == "dur":
        period, unit = period * length, last
        inside = unit == "ep" and plan.sized
    else:
        inside = False
    due, before = [], Fraction(0)
    batch = sample = epoch = 0
    while True:
        for index, size in enumerate(SIZES):
            batch, sample = batch + 1, sample + size
            counts = {"ep": Fraction(epoch), "ba": batch, "sp": sample, "tok": TOKENS * sample}
            if inside and index + 1 < len(SIZES):
                counts["ep"] = epoch + Fraction(index + 1, len(SIZES))
            now = Fraction(counts[unit])
            # Just short of the epoch's end, where only what lies inside of it has been reached.
            reached = math.ceil((epoch + 1) / period) - 1 if inside and index + 1 == len(SIZES) else now // period
            if reached > before:
                due.append((batch, False))
            before = reached
            if last != "ep" and counts[last] >= length:
                if index + 1 == len(SIZES) and plan.sized and unit == "ep" and (epoch + 1) // period > before:
                    due.append((batch, True))
                return due
        epoch += 1
        reached = Fraction({"ep": epoch, "ba": batch, "sp": sample, "tok": TOKENS * sample}[unit]) // period
        if reached > before:
            due.append((batch, True))
        before = reached
        if last == "ep" and epoch >= length:
            return due


def _split(text: str) -> tuple[Fraction, str]:
    unit = text.lstrip("0123456789.")
    return Fraction(text.removesuffix(unit)), unit
