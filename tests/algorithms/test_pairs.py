"""Combinations of algorithms on two small tasks: each pair trains and resumes bit for bit, or is refused at the start.

The first tier trains groups of up to six algorithms that cover every pair at least once, and the second tier groups of
up to three, in which less can hide. When a group fails, its pairs are tried separately, and the failure names those
that fail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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

pytestmark = [
    pytest.mark.usefixtures("without_compiling"),
    # torch itself warns when it compiles for the first time.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

# Pairs that are refused with this message, although their classes declare no conflict.
REFUSED = {
    ("layer_freezing", "no_op_model"): "LayerFreezing needs a model with at least two layers",
}

# The algorithms of a chain change batches one after another, in the order that the user chooses.
CHAINS = (
    {snake_case(name) for name in AUGMENTATIONS},
    # Depending on the order, the kept sequences are cut into pieces, or some of the pieces are kept.
    {"alibi", "batch_size_warmup"},
    {"alibi", "selective_backprop"},
    # Depending on the order, samples are selected by the losses of whole sequences or of the trained part.
    {"selective_backprop", "seq_length_warmup"},
)

PAIRS = [(task, *pair) for task, keys in FITTING.items() for pair in combinations(keys, 2)]


class Watch(Callback):
    """Stores the model before training and whether training started, and saves a checkpoint in the second epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.initial: dict[str, Tensor] = {}
        self.started = False

    def before_load(self, state, logger):
        self.initial = weights_of(state.unwrapped_model)

    def before_dataloader(self, state, logger):
        self.started = True

    def batch_checkpoint(self, state, logger):
        if state.timestamp.batch == 3:
            save_checkpoint(state, self.folder)


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def order_of(trainer: Trainer) -> list[str]:
    return [algorithm.config_key for algorithm in trainer.state.algorithms]


def precedes(first: type[Algorithm], second: type[Algorithm]) -> bool:
    """Return whether the first class is declared to run before the second."""
    return second.__name__ in first.runs_before or first.__name__ in second.runs_after


def assert_equal(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip syncing to disk: hundreds of checkpoints are written here, and none has to survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def refusal_of(task: str, key: str, other: str) -> str | None:
    """Return the message that a pair is refused with, or None if it can be combined."""
    pair = [type(make_algorithm(task, name)) for name in (key, other)]
    conflict = any(first.__name__ in second.conflicts_with for first, second in permutations(pair))
    return "cannot be combined" if conflict else REFUSED.get((key, other))


REFUSALS = {(task, key, other): refusal_of(task, key, other) for task, key, other in PAIRS}
COMPATIBLE = [pair for pair, refusal in REFUSALS.items() if refusal is None]


def make_groups(task: str, size: int) -> list[tuple[str, ...]]:
    """Return groups of at most `size` compatible algorithms that cover each compatible pair of a task."""
    allowed = {frozenset(pair) for task_of_pair, *pair in COMPATIBLE if task_of_pair == task}
    missing = dict.fromkeys(sorted(allowed, key=sorted))
    groups = []
    while missing:
        group = sorted(next(iter(missing)))
        while len(group) < size:
            num_new = {
                key: sum(frozenset((key, member)) in missing for member in group)
                for key in FITTING[task]
                if all(frozenset((key, member)) in allowed for member in group)
            }
            if not num_new or max(num_new.values()) == 0:
                break
            group.append(max(num_new, key=num_new.__getitem__))
        for pair in combinations(group, 2):
            missing.pop(frozenset(pair), None)
        groups.append(tuple(key for key in FITTING[task] if key in group))
    return groups


GROUPS, SMALL_GROUPS = ([(task, *group) for task in FITTING for group in make_groups(task, size)] for size in (6, 3))


@pytest.mark.parametrize("groups", [GROUPS, SMALL_GROUPS], ids=["six", "three"])
def test_groups_cover_every_compatible_pair(groups: list[tuple[str, ...]]):
    covered = {(task, *pair) for task, *group in groups for pair in combinations(group, 2)}
    assert covered == {*COMPATIBLE} and len(COMPATIBLE) > 750


@pytest.mark.parametrize(
    "group",
    [
        *(pytest.param(group, id="-".join(group)) for group in GROUPS),
        *(pytest.param(group, id="-".join(group), marks=pytest.mark.slow) for group in SMALL_GROUPS),
    ],
)
def test_a_group_trains_and_resumes(group: tuple[str, ...], tmp_path: Path):
    task, *keys = group
    try:
        assert_trains_and_resumes(task, keys, tmp_path / "group")
    except Exception as error:
        for pair in combinations(keys, 2):
            try:
                assert_trains_and_resumes(task, pair, tmp_path / "-".join(pair))
            except Exception as pair_error:
                error.add_note(f"{' and '.join(pair)} fail as a pair: {pair_error}")
        raise


def assert_trains_and_resumes(task: str, keys: Sequence[str], folder: Path) -> None:
    """Train, then resume from the middle with the algorithms in reverse order: both runs must be bit-identical."""
    watch = Watch(folder / "checkpoint")
    with make_trainer(task, *keys, folder=folder, callbacks=[watch]) as trainer:
        trainer.fit()
        metrics = {**trainer.state.eval_metric_values["eval"]}
        assert_equal(trainer.eval()["eval"], metrics)  # evaluation changes neither training nor random streams
    weights = weights_of(trainer.state.unwrapped_model)
    assert all(value.isfinite().all() for value in [*weights.values(), *metrics.values(), trainer.state.total_loss])
    trained = dict(trainer.state.unwrapped_model.named_parameters())
    assert "no_op_model" in keys or any(not torch.equal(watch.initial[name], trained[name]) for name in trained)

    order = reverse(keys)
    watch_resumed = Watch(folder / "unused")
    with make_trainer(task, *order, folder=folder, callbacks=[watch_resumed], resume_path=watch.folder) as resumed:
        resumed.fit()
    assert_equal(watch_resumed.initial, watch.initial)
    assert_equal(weights_of(resumed.state.unwrapped_model), weights)
    assert_equal(resumed.state.eval_metric_values["eval"], metrics)
    assert_in_order(task, keys, order_of(trainer))
    assert_in_order(task, order, order_of(resumed))


def reverse(keys: Sequence[str]) -> list[str]:
    """Return algorithms in reverse order, except that each chain stays in the order that the user chose."""
    order = [*keys][::-1]
    for chain in CHAINS * len(CHAINS):  # restoring one chain may disturb another that shares an algorithm with it
        positions = [index for index, key in enumerate(order) if key in chain]
        links = [key for key in keys if key in chain]
        for position, key in zip(positions, links, strict=True):
            order[position] = key
    return order


def assert_in_order(task: str, keys: Sequence[str], order: Sequence[str]) -> None:
    """Check that all pairs run in their declared order."""
    assert sorted(order) == sorted(keys)
    kinds = {key: type(make_algorithm(task, key)) for key in order}
    for key, other in combinations(order, 2):
        assert not precedes(kinds[other], kinds[key])


@pytest.mark.parametrize(("task", "key", "other"), [pair for pair, refusal in REFUSALS.items() if refusal is not None])
def test_conflicting_pairs_are_refused(task: str, key: str, other: str, tmp_path: Path):
    for keys in ((key, other), (other, key)):
        watch = Watch(tmp_path / "unused")
        with (
            pytest.raises(ValueError, match=REFUSALS[task, key, other]) as caught,
            make_trainer(task, *keys, folder=tmp_path, callbacks=[watch]) as trainer,
        ):
            trainer.fit()
        assert not watch.started
        message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert CLASSES[key] in message or CLASSES[other] in message


def make_algorithms(keys: list[str]) -> list[Algorithm]:
    return [make_algorithm("images", key) for key in keys]


@pytest.mark.parametrize("seed", range(5))
def test_all_algorithms_together_are_sorted_by_their_declared_order(seed: int):
    shuffled = torch.randperm(len(CLASSES), generator=torch.Generator().manual_seed(seed)).tolist()
    ordered = [*map(type, sort_algorithms(make_algorithms([[*CLASSES][index] for index in shuffled])))]
    assert sorted(kind.__name__ for kind in ordered) == sorted(CLASSES.values())
    assert [pair for pair in combinations(ordered, 2) if precedes(*pair[::-1])] == []


@pytest.mark.parametrize("task", FITTING)
def test_a_pair_without_a_declared_order_runs_in_the_order_of_the_config(task: str):
    pairs = [*permutations([make_algorithm(task, key) for key in FITTING[task]], 2)]
    free = [pair for pair in pairs if sort_algorithms(pair) != sort_algorithms(pair[::-1])]
    declared = [(a, b) for a, b in pairs if precedes(type(a), type(b)) or precedes(type(b), type(a))]
    assert len(free) + len(declared) == len(pairs) and all(sort_algorithms(pair) == [*pair] for pair in free)


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
def test_algorithms_run_in_the_order_of_their_groups(order: list[tuple[str, ...]]):
    for first, second in pairwise(order):
        for earlier, later in product(first, second):
            ordered = sort_algorithms(make_algorithms([snake_case(later), snake_case(earlier)]))
            assert [type(algorithm).__name__ for algorithm in ordered] == [earlier, later]


def test_declarations_name_existing_algorithms():
    for algorithm in make_algorithms([*CLASSES]):
        declared = {*algorithm.runs_before, *algorithm.runs_after, *algorithm.conflicts_with}
        assert declared <= {*CLASSES.values()}, type(algorithm).__name__


def test_surgery_runs_at_init_and_averages_and_compile_later():
    """Surgery runs at INIT; averages collect the parameters at AFTER_LOAD, before Compile, which changes none."""
    late = make_algorithms(["compile", "ema", "lawa", "schedule_free", "swa"])
    assert not any(overrides(algorithm, Event.INIT) for algorithm in late)
    surgery = [algorithm for algorithm in make_algorithms([*CLASSES]) if overrides(algorithm, Event.INIT)]
    assert len(surgery) > 15
    # At AFTER_LOAD, StochasticDepth only sets rates, which are not parameters, and DDP only checks the model.
    both = {type(algorithm).__name__ for algorithm in surgery if overrides(algorithm, Event.AFTER_LOAD)}
    assert both == {"DDP", "StochasticDepth"}
