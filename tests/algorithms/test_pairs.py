"""Combinations of algorithms on two small tasks: each pair trains and resumes to the bit, or is refused at the start.

The first tier trains groups of up to six algorithms that cover every pair at least once. When a group fails, its pairs
are tried one by one, and the failure names those that fail. The second tier trains each pair separately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product
from pathlib import Path

import pytest
import torch
from tasks import CLASSES, FITTING, make_algorithm, make_trainer
from torch import Tensor

from runner import Algorithm, Callback, Trainer, save_checkpoint
from runner.algorithms._batch import AUGMENTATIONS
from runner.algorithms._surgery import LAYER_SURGERY
from runner.core.engine import overrides
from runner.core.ordering import snake_case, sort_algorithms
from runner.timing.event import Event

# torch itself warns when it compiles for the first time.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

# Pairs that are refused with this message, besides those whose classes declare a conflict.
REFUSED = {
    ("layer_freezing", "no_op_model"): "LayerFreezing needs a model with at least two layers",
}

# The algorithms of a chain change batches one after another, in the order that the user chooses.
CHAINS = (
    {snake_case(name) for name in AUGMENTATIONS},
    {"alibi", "batch_size_warmup"},  # either pieces of some sequences, or some of the pieces
    {"alibi", "selective_backprop"},
    {"selective_backprop", "seq_length_warmup"},  # either losses of whole sequences, or of their trained part
)

PAIRS = [(task, *pair) for task, keys in FITTING.items() for pair in combinations(keys, 2)]


class Watch(Callback):
    """Keeps the model as it is before training, and saves a checkpoint in the middle of the second epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.first: dict[str, Tensor] = {}
        self.started = False

    def before_load(self, state, logger):
        self.first = weights_of(state.unwrapped_model)

    def before_dataloader(self, state, logger):
        self.started = True

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 3:
            save_checkpoint(state, self.folder)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def order_of(trainer: Trainer) -> list[str]:
    return [one.config_key for one in trainer.state.algorithms]


def precedes(one: type[Algorithm], other: type[Algorithm]) -> bool:
    """Return whether one is declared to run before the other."""
    return other.__name__ in one.runs_before or one.__name__ in other.runs_after


def assert_equal(values: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    torch.testing.assert_close(values, others, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncing to disk: hundreds of checkpoints are written here, and none has to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    """Run everything that `Compile` does, except that torch does not compile, which would take seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def refusal_of(task: str, key: str, other: str) -> str | None:
    """Return the message that a pair is refused with, or None if it can be combined."""
    pair = [type(make_algorithm(task, one)) for one in (key, other)]
    conflict = any(one.__name__ in another.conflicts_with for one, another in permutations(pair))
    return "cannot be combined" if conflict else REFUSED.get((key, other))


REFUSALS = {(task, key, other): refusal_of(task, key, other) for task, key, other in PAIRS}
TOGETHER = [pair for pair, refusal in REFUSALS.items() if refusal is None]
MOST = 6  # algorithms in a group


def make_groups(task: str) -> list[tuple[str, ...]]:
    """Return groups of at most `MOST` compatible algorithms that cover each compatible pair of a task."""
    allowed = {frozenset(pair) for of, *pair in TOGETHER if of == task}
    missing = dict.fromkeys(sorted(allowed, key=sorted))
    groups = []
    while missing:
        group = sorted(next(iter(missing)))
        while len(group) < MOST:
            found = {
                key: sum(frozenset((key, one)) in missing for one in group)
                for key in FITTING[task]
                if all(frozenset((key, one)) in allowed for one in group)
            }
            if not found or max(found.values()) == 0:
                break
            group.append(max(found, key=found.__getitem__))
        for pair in combinations(group, 2):
            missing.pop(frozenset(pair), None)
        groups.append(tuple(key for key in FITTING[task] if key in group))
    return groups


GROUPS = [(task, *group) for task in FITTING for group in make_groups(task)]


def test_groups_hold_each_pair_that_goes_together():
    held = {(task, *pair) for task, *group in GROUPS for pair in combinations(group, 2)}
    assert held == {*TOGETHER} and len(TOGETHER) > 750


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_a_group_trains_and_is_resumed(group: tuple[str, ...], tmp_path: Path):
    task, *keys = group
    try:
        assert_trains_and_is_resumed(task, keys, tmp_path / "group")
    except Exception as error:
        for pair in combinations(keys, 2):
            try:
                assert_trains_and_is_resumed(task, pair, tmp_path / "-".join(pair))
            except Exception as of_pair:
                error.add_note(f"{' and '.join(pair)} fail by themselves: {of_pair}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize(("task", "key", "other"), TOGETHER)
def test_a_pair_trains_and_is_resumed(task: str, key: str, other: str, tmp_path: Path):
    assert_trains_and_is_resumed(task, (key, other), tmp_path)


def assert_trains_and_is_resumed(task: str, keys: Sequence[str], folder: Path) -> None:
    """Train, then resume from the middle with the algorithms in reverse order: both runs must be equal to the bit."""
    watch = Watch(folder / "checkpoint")
    with make_trainer(task, *keys, folder=folder, callbacks=[watch]) as trainer:
        trainer.fit()
        metrics = {**trainer.state.eval_metric_values["eval"]}
        assert_equal(trainer.eval()["eval"], metrics)  # evaluation leaves no trace of training, and draws nothing
    weights = weights_of(trainer.state.unwrapped_model)
    assert all(value.isfinite().all() for value in [*weights.values(), *metrics.values(), trainer.state.total_loss])
    trained = dict(trainer.state.unwrapped_model.named_parameters())
    assert "no_op_model" in keys or any(not torch.equal(watch.first[name], trained[name]) for name in trained)

    given = other_way_round(keys)
    resumed = Watch(folder / "unused")
    with make_trainer(task, *given, folder=folder, callbacks=[resumed], resume_path=watch.folder) as again:
        again.fit()
    assert_equal(resumed.first, watch.first)
    assert_equal(weights_of(again.state.unwrapped_model), weights)
    assert_equal(again.state.eval_metric_values["eval"], metrics)
    assert_in_order(task, keys, order_of(trainer))
    assert_in_order(task, given, order_of(again))


def other_way_round(keys: Sequence[str]) -> list[str]:
    """Return algorithms in reverse order, except that each chain stays in the order that the user chose."""
    given = [*keys][::-1]
    for chain in CHAINS:
        places = [index for index, key in enumerate(given) if key in chain]
        links = [key for key in keys if key in chain]
        for place, key in zip(places, links, strict=True):
            given[place] = key
    return given


def assert_in_order(task: str, given: Sequence[str], order: Sequence[str]) -> None:
    """Each pair runs in its declared order; a pair without one, alone, runs in the order in which it was given."""
    assert sorted(order) == sorted(given)
    kinds = {key: type(make_algorithm(task, key)) for key in order}
    for key, other in combinations(order, 2):
        assert not precedes(kinds[other], kinds[key])
    if len(given) == 2 and not any(precedes(*pair) for pair in permutations(kinds.values())):
        assert [*order] == [*given]


@pytest.mark.parametrize(("task", "key", "other"), [pair for pair, refusal in REFUSALS.items() if refusal is not None])
def test_a_pair_is_refused(task: str, key: str, other: str, tmp_path: Path):
    refusal = REFUSALS[task, key, other]
    assert refusal is not None
    assert_refused(task, key, other, refusal, tmp_path)


def assert_refused(task: str, key: str, other: str, refusal: str, folder: Path) -> None:
    for keys in ((key, other), (other, key)):
        watch = Watch(folder / "unused")
        with (
            pytest.raises(ValueError, match=refusal) as caught,
            make_trainer(task, *keys, folder=folder, callbacks=[watch]) as trainer,
        ):
            trainer.fit()
        assert not watch.started
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert CLASSES[key] in said or CLASSES[other] in said


def all_of(keys: list[str]) -> list[Algorithm]:
    return [make_algorithm("images", key) for key in keys]


@pytest.mark.parametrize("seed", range(5))
def test_all_together_are_in_the_order_that_they_declare(seed: int):
    shuffled = torch.randperm(len(CLASSES), generator=torch.Generator().manual_seed(seed)).tolist()
    ordered = [type(one) for one in sort_algorithms(all_of([[*CLASSES][index] for index in shuffled]))]
    assert sorted(one.__name__ for one in ordered) == sorted(CLASSES.values())
    assert [pair for pair in combinations(ordered, 2) if precedes(*pair[::-1])] == []


# Algorithms of one group run before those of the next.
ORDERS = (
    [("BatchSizeWarmup", "InfoBatch", "SelectiveBackprop"), AUGMENTATIONS, ("ChannelsLast",)],
    [("MixUp", "CutMix"), ("LabelSmoothing",)],
    [("GradientClipping",), ("NaNGuard",)],
    [LAYER_SURGERY, ("StochasticDepth",), ("ActivationCheckpointing", "ChannelsLast"), ("NoOpModel",)],
    [("BlurPool",), ("SqueezeExcite",), ("Factorize",), ("WeightStandardization",)],
    [("GatedLinearUnits", "LogitSoftcap"), ("Factorize",)],
    [("EMA", "LAWA", "SWA", "ScheduleFree"), ("Compile",)],
    [("GatedLinearUnits", "QKNorm"), ("LowPrecisionGroupNorm", "LowPrecisionLayerNorm")],
)


@pytest.mark.parametrize("order", ORDERS)
def test_whoever_needs_to_comes_first(order: list[tuple[str, ...]]):
    for first, second in pairwise(order):
        for one, other in product(first, second):
            ordered = sort_algorithms(all_of([snake_case(other), snake_case(one)]))
            assert [type(algorithm).__name__ for algorithm in ordered] == [one, other]


def test_names_that_are_declared_are_those_of_algorithms():
    for one in all_of([*CLASSES]):
        declared = {*one.runs_before, *one.runs_after, *one.conflicts_with}
        assert declared <= {*CLASSES.values()}, type(one).__name__


def test_surgery_comes_before_averages_and_these_see_what_compile_leaves_in_place():
    """Surgery runs at INIT; averages collect the parameters at AFTER_LOAD, before Compile, which changes none."""
    late = all_of(["compile", "ema", "lawa", "schedule_free", "swa"])
    assert not any(overrides(one, Event.INIT) for one in late)
    surgery = [one for one in all_of([*CLASSES]) if overrides(one, Event.INIT)]
    assert len(surgery) > 15
    # StochasticDepth sets only the rates of its blocks there, which are not parameters, and DDP looks at the model.
    both = {type(one).__name__ for one in surgery if overrides(one, Event.AFTER_LOAD)}
    assert both == {"DDP", "StochasticDepth"}
