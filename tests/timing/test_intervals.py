"""Intervals in real runs are due exactly at their multiples, in every unit, after a resume, and on two ranks."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rank_runs import program_of
from tiers import fast
from torch import nn

from runner import Callback, ClassificationModel, Trainer, get_global_rank, save_checkpoint
from runner.data import TensorLoader
from runner.distributed.collectives import destroy_process_group, init_process_group
from runner.timing.time import Interval

SEEDS = 40
SAMPLES = 11
BATCH = 3
TOKENS = 5
SIZES = [3, 3, 3, 2]  # samples in each batch of an epoch


class Counted(ClassificationModel):
    """Has five tokens in each sample."""

    def num_tokens(self, batch: Any) -> int:
        return TOKENS * len(batch[1])


class Unsized(TensorLoader):
    """Has no length, like a loader of a stream."""

    __len__ = None  # type: ignore[assignment]


class Watch(Callback):
    """Stores when each interval is due, as pairs: the batch, and whether its epoch has ended."""

    def __init__(self, intervals: list[str]) -> None:
        self.intervals = {text: Interval(text) for text in intervals}
        self.seen: dict[str, list[tuple[int, bool]]] = {text: [] for text in intervals}

    def batch_end(self, state, logger):
        self._check(state, False)

    def epoch_end(self, state, logger):
        self._check(state, True)

    def _check(self, state, has_ended):
        for text, interval in self.intervals.items():
            if state.is_due(interval):
                self.seen[text].append((state.timestamp.batch, has_ended))

    def state_dict(self):
        return {"seen": {text: [list(pair) for pair in seen] for text, seen in self.seen.items()}}

    def load_state_dict(self, state):
        self.seen = {text: [(batch, ended) for batch, ended in seen] for text, seen in state["seen"].items()}


class Plan(NamedTuple):
    """The duration of a run, the intervals to watch, and whether its loader has a length."""

    max_duration: str
    intervals: list[str]
    sized: bool
    cut: int
    """The batch after which a run is stopped and resumed."""


def draw(seed: int) -> Plan:
    """Return a random plan of at most six epochs, with an interval in each unit."""
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
    """Train as planned, and return when each interval was due. All ranks.

    Args:
        plan: plan of the run.
        folder: folder for its files.
        resumed: whether the run is stopped and resumed, or trains without a break.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    targets = torch.arange(SAMPLES) % 2

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
    """Saves a checkpoint after a number of batches, and stops."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch = batch
        self.path = path

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == self.batch:
            save_checkpoint(state, self.path)
            state.stop_training()


def by_hand(plan: Plan, text: str) -> list[tuple[int, bool]]:
    """Return when an interval is due: at the first step that reaches each of its multiples.

    Steps are batches and ends of epochs. A whole number of epochs is reached when an epoch ends, after its last batch.
    A fraction of an epoch is reached by a batch, or only at the epoch's end if nobody knows the epoch's length.
    """
    length, run_unit = _split(plan.max_duration)
    period, unit = _split(text)
    if unit == "dur":
        period, unit = period * length, run_unit
        within_epochs = unit == "ep" and plan.sized
    else:
        within_epochs = False
    due, before = [], Fraction(0)
    batch = sample = epoch = 0
    while True:
        for index, size in enumerate(SIZES):
            batch, sample = batch + 1, sample + size
            counts = {"ep": Fraction(epoch), "ba": batch, "sp": sample, "tok": TOKENS * sample}
            if within_epochs and index + 1 < len(SIZES):
                counts["ep"] = epoch + Fraction(index + 1, len(SIZES))
            now = Fraction(counts[unit])
            # The last batch reaches the multiples below the epoch's end; the end itself is the next step.
            is_last = index + 1 == len(SIZES)
            reached = math.ceil((epoch + 1) / period) - 1 if within_epochs and is_last else now // period
            if reached > before:
                due.append((batch, False))
            before = reached
            if run_unit != "ep" and counts[run_unit] >= length:
                if is_last and plan.sized and unit == "ep" and (epoch + 1) // period > before:
                    due.append((batch, True))
                return due
        epoch += 1
        reached = Fraction({"ep": epoch, "ba": batch, "sp": sample, "tok": TOKENS * sample}[unit]) // period
        if reached > before:
            due.append((batch, True))
        before = reached
        if run_unit == "ep" and epoch >= length:
            return due


def _split(text: str) -> tuple[Fraction, str]:
    unit = text.lstrip("0123456789.")
    return Fraction(text.removesuffix(unit)), unit


@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        (Plan("2ep", ["0.1dur"], True, 1), [1, 2, 3, 4, 5, 6, 7, 8]),
        (Plan("2ep", ["0.25dur"], True, 1), [2, 4, 6, 8]),
        (Plan("2ep", ["0.25dur"], False, 1), [4, 8]),  # epochs of unknown length
        (Plan("8ba", ["0.25dur"], True, 1), [2, 4, 6, 8]),
        (Plan("3ep", ["0.5dur"], True, 1), [6, 12]),
    ],
)
def test_a_fraction_of_a_run_is_due_within_epochs_of_known_length(tmp_path: Path, plan: Plan, batches: list[int]):
    (text,) = plan.intervals
    expected = by_hand(plan, text)
    assert sorted({batch for batch, _ in expected}) == batches
    assert train(plan, tmp_path, resumed=False) == {text: expected}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("seed", fast(range(SEEDS), *range(12)))
def test_intervals_are_due_at_their_multiples(tmp_path: Path, seed: int, resumed: bool):
    plan = draw(seed)
    assert train(plan, tmp_path, resumed) == {text: by_hand(plan, text) for text in plan.intervals}, plan


def train_on_a_rank() -> None:
    """Train ten plans on this rank, with and without a resume, and save when the intervals were due."""
    init_process_group(torch.device("cpu"))
    seen = [
        [train(draw(seed), Path(f"run{seed}-{resumed}"), resumed) for resumed in (False, True)] for seed in range(10)
    ]
    Path(f"{get_global_rank()}.json").write_text(json.dumps(seen))
    destroy_process_group()


def test_intervals_are_due_at_the_same_batches_on_two_ranks(tmp_path: Path, run_ranks):
    run_ranks(program_of("timing/test_intervals", "train_on_a_rank"), 2)
    for rank in range(2):
        for seed, runs in enumerate(json.loads((tmp_path / f"{rank}.json").read_text())):
            plan = draw(seed)
            expected = {text: [list(pair) for pair in by_hand(plan, text)] for text in plan.intervals}
            assert runs == [expected, expected], (rank, plan)
