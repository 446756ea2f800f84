"""Which jobs of a sweep train alike, and up to which batch, as their configs say."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from runner.config.command_line import merge_repeated
from runner.config.composed import to_plain
from runner.runs.recompose import composing
from runner.sweeps.plan import PlannedJob
from runner.sweeps.sharing.foresight import Foreseen, looks_at_length
from runner.sweeps.sharing.tree import Tree, plan_tree

# 12 batches an epoch, so 60 in all.
MLP = ("model=mlp", "data.batch_size=100", "trainer.max_duration=5ep", "algorithms=none", "callbacks=none")
CONSTANT = (*MLP, "scheduler=constant")
GPT = ("model=gpt", "data=synthetic_tokens", "trainer.max_duration=100ba", "algorithms=none", "callbacks=none")

OWN = """
import torch

import runner
from runner.data.images.digits import load_digits


class Half(runner.Algorithm):
    def after_loss(self, state, logger):
        if state.timestamp.batch * 2 > state.max_duration.value:
            state.loss = state.loss / 2


class Quiet(runner.Callback):
    pass


class Late(runner.Callback):
    def __init__(self, start=10, size=1):
        self.start, self.size = start, size

    def effect_at(self, state):
        return self.size if state.timestamp.batch >= self.start else None


class Stepping(runner.ClassificationModel):
    def training_step(self, state):
        raise NotImplementedError


def now(state):
    return state.timestamp.batch == 3


def rate(timestamp):
    return 1.0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's module `own_parts`."""
    (tmp_path / "own_parts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def tree_of(*arguments: str, **swept: Sequence[Any]) -> Tree:
    """The tree of the combinations of swept values; `__` in a name stands for a dot."""
    keys = [key.replace("__", ".") for key in swept]
    jobs = []
    with composing():
        for values in product(*swept.values()):
            overrides = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
            jobs.append(PlannedJob(overrides, to_plain(compose("config", merge_repeated([*arguments, *overrides])))))
    return plan_tree(jobs)


def starts(tree: Tree) -> list[int]:
    return [one.start for one in tree.branches]


def test_decays_share_what_comes_before_them_in_a_tree():
    tree = tree_of(
        *MLP, "scheduler=warmup_stable_decay", scheduler__t_decay=["0.2dur", "0.5dur"], scheduler__alpha_f=[0, 0.1]
    )
    assert [(one.parent, one.start, one.end) for one in tree.branches] == [
        (None, 0, 60),
        (0, 49, 60),  # batch 49 is the last with the base rate: the decay begins with its own first value
        (0, 31, 60),
        (0, 31, 60),
    ]
    assert [(one.batch, one.head, len(one.lengths), one.epoch, one.batch_in_epoch) for one in tree.nodes] == [
        (31, 0, 4, 2, 7),
        (49, 0, 2, 4, 1),
    ]
    assert {one.why for one in tree.branches[1:]} == {"scheduler"}
    described = tree.as_json()
    assert (described["batches"], described["batches_alone"]) == (60 + 11 + 29 + 29, 240)


def test_a_branch_has_branches_of_its_own():
    tree = tree_of(
        *CONSTANT,
        "scheduler=multi_step",
        "+algorithms=ema",
        scheduler__gamma=[0.1, 0.2],
        scheduler__milestones=["[20ba]"],
        algorithms__ema__start=["30ba", "50ba"],
    )
    assert [(one.parent, one.start) for one in tree.branches] == [(None, 0), (0, 29), (0, 20), (2, 29)]
    assert [(one.batch, one.head, len(one.lengths)) for one in tree.nodes] == [(20, 0, 4), (29, 0, 2), (29, 2, 2)]


SHARED = {
    "durations": ((*CONSTANT,), {"trainer__max_duration": ["2ep", "5ep"]}, 23),
    "durations in batches": ((*CONSTANT,), {"trainer__max_duration": ["30ba", "60ba"]}, 29),
    "cooldowns of several lengths of run": (
        (*MLP, "scheduler=warmup_stable_decay", "scheduler.t_decay=10ba", "scheduler.t_warmup=0ba"),
        {"trainer__max_duration": ["30ba", "60ba"]},
        21,
    ),
    "ratio of the schedule": ((*CONSTANT,), {"trainer__scale_schedule_ratio": [0.5, 1.0]}, 29),
    "evaluation": ((*CONSTANT,), {"trainer__eval_interval": ["1ep", "2ep"]}, 12),
    "evaluation in batches": ((*CONSTANT,), {"trainer__eval_interval": ["7ba", "14ba"]}, 6),
    "stopper": (
        (*CONSTANT, "+callbacks=early_stopper", "callbacks.early_stopper.monitor=loss"),
        {"callbacks__early_stopper__patience": ["1ep", "3ep"]},
        24,  # at the end of the second epoch the first may stop
    ),
    "average": ((*CONSTANT, "+algorithms=ema"), {"algorithms__ema__start": ["0.5dur", "0.7dur"]}, 29),
    "average of another length": (
        (*CONSTANT, "+algorithms=ema", "algorithms.ema.start=0.5dur"),
        {"algorithms__ema__smoothing": [0.9, 0.99], "algorithms__ema__half_life": ["null"]},
        29,
    ),
    "swa": ((*CONSTANT, "+algorithms=swa"), {"algorithms__swa__start": ["0.4dur", "0.8dur"]}, 24),
    "lawa": ((*CONSTANT, "+algorithms=lawa"), {"algorithms__lawa__start": ["0.4dur", "0.8dur"]}, 24),
    "selective backprop": (
        (*CONSTANT, "+algorithms=selective_backprop"),
        {"algorithms__selective_backprop__start": [0.5, 0.7]},
        29,
    ),
    "layer freezing": (
        (*CONSTANT, "+algorithms=layer_freezing"),
        {"algorithms__layer_freezing__freeze_start": [0.5, 0.7]},
        30,
    ),
    "progressive resizing": (
        ("model=resnet8", *CONSTANT[1:], "+algorithms=progressive_resizing"),
        {"algorithms__progressive_resizing__delay_fraction": [0.3, 0.5]},
        18,
    ),
    "interval of a callback": (
        (*CONSTANT, "+callbacks=activation_monitor"),
        {"callbacks__activation_monitor__interval": ["25ba", "50ba"]},
        24,
    ),
    "interval as a fraction of the run": (
        (*CONSTANT, "+callbacks=activation_monitor", "callbacks.activation_monitor.interval=0.5dur"),
        {"trainer__max_duration": ["40ba", "60ba"]},
        19,
    ),
    "interval in minutes": (
        (*CONSTANT, "callbacks=checkpoint_saver", "callbacks.checkpoint_saver.save_interval=10m"),
        {"trainer__max_duration": ["40ba", "60ba"]},
        39,
    ),
    "test": ((*CONSTANT,), {"objective": ["eval/loss", "train/loss"]}, 59),
    "warm-up of a cosine": (
        (*MLP, "scheduler=cosine_annealing", "scheduler.t_warmup=20ba"),
        {"scheduler__alpha_f": [0, 0.1]},
        21,
    ),
    "two ranks": ((*CONSTANT, "launch.nproc_per_node=2"), {"trainer__max_duration": ["2ep", "5ep"]}, 23),
    "three ranks that are deterministic": (
        (*CONSTANT, "launch.nproc_per_node=3", "trainer.deterministic=true"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        23,
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_begins_later_is_shared_up_to_there(case: str):
    arguments, swept, start = SHARED[case]
    tree = tree_of(*arguments, **swept)
    assert starts(tree) == [0, start] and tree.branches[1].parent == 0


ALONE = {
    "weight decay": ((*CONSTANT,), {"optimizer__weight_decay": [0, 0.1]}, "optimizer.weight_decay"),
    "seed": ((*CONSTANT,), {"seed": [0, 1]}, "seed"),
    "batch size": ((*CONSTANT,), {"data__batch_size": [50, 100]}, "data.batch_size"),
    "rate": ((*CONSTANT,), {"optimizer__lr": [0.1, 0.2]}, "optimizer.lr"),
    "ranks": ((*CONSTANT,), {"launch__nproc_per_node": [1, 2]}, "launch.nproc_per_node"),
    "three ranks": ((*CONSTANT, "launch.nproc_per_node=3"), {"trainer__max_duration": ["2ep", "5ep"]}, "deterministic"),
    "end of a cosine": (
        (*MLP, "scheduler=cosine_annealing", "scheduler.t_warmup=0ba"),
        {"trainer__max_duration": ["4ep", "5ep"]},
        "scheduler",
    ),
    "final rate of a cosine": (
        (*MLP, "scheduler=cosine_annealing", "scheduler.t_warmup=0ba"),
        {"scheduler__alpha_f": [0, 0.1]},
        "scheduler",
    ),
    "warm-up": ((*CONSTANT,), {"scheduler__t_warmup": ["10ba", "20ba"]}, "scheduler"),
    "algorithm that looks at the length": (
        ("model=mlp", *CONSTANT[1:], "+algorithms=batch_size_warmup"),
        {"trainer__max_duration": ["4ep", "5ep"]},
        "algorithms.batch_size_warmup",
    ),
    "stochastic depth": (
        (
            "model=resnet8",
            *CONSTANT[1:],
            "+algorithms=stochastic_depth",
            "algorithms.stochastic_depth.target_block=Residual",
        ),
        {"algorithms__stochastic_depth__drop_warmup": ["0.1dur", "0.2dur"]},
        "algorithms.stochastic_depth",
    ),
    "sequence length": (
        (*GPT, "scheduler=constant", "+algorithms=seq_length_warmup"),
        {"trainer__max_duration": ["90ba", "100ba"]},
        "algorithms.seq_length_warmup",
    ),
    "average that begins at a sample": (
        (*CONSTANT, "+algorithms=ema"),
        {"algorithms__ema__start": ["1000sp", "2000sp"]},
        "algorithms.ema",
    ),
    "length in samples": ((*CONSTANT,), {"trainer__max_duration": ["1000sp", "2000sp"]}, "its length is not known"),
    "length in seconds": ((*CONSTANT,), {"trainer__max_duration": ["10m", "20m"]}, "its length is not known"),
    "budget": ((*CONSTANT,), {"budget": ["1e8flop", "2e8flop"]}, "budget"),
    "plateau": ((*MLP, "scheduler=reduce_on_plateau"), {"trainer__max_duration": ["4ep", "5ep"]}, "scheduler"),
    "a user's algorithm": (
        (*CONSTANT, "+algorithms.mine._target_=own_parts.Half"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        "algorithms.mine: own_parts.Half does not say",
    ),
    "a user's algorithm beside schedules that differ": (
        (*MLP, "scheduler=warmup_stable_decay", "+algorithms.mine._target_=own_parts.Half"),
        {"scheduler__alpha_f": [0, 0.1]},
        "algorithms.mine: own_parts.Half does not say",
    ),
    "a user's callback": (
        (*CONSTANT, "+callbacks.mine._target_=own_parts.Quiet"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        "callbacks.mine: own_parts.Quiet does not say",
    ),
    "a model that sees the state": (
        (*CONSTANT, "model._target_=own_parts.Stepping"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        "model: own_parts.Stepping may have a training_step",
    ),
    "a function as interval": (
        (*CONSTANT, "trainer.eval_interval={_target_: own_parts.now, _partial_: true}"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        "trainer.eval_interval",
    ),
    "a user's schedule": (
        (*MLP, "scheduler=none", "+scheduler._target_=own_parts.rate", "+scheduler._partial_=true"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        "scheduler",
    ),
    "a fraction of the run in a callback": (
        (*CONSTANT, "callbacks=learning_curves", "+callbacks.learning_curves.after=0.5dur"),
        {"trainer__max_duration": ["2ep", "5ep"]},
        "callbacks.learning_curves",
    ),
    "callbacks in another order": (
        (*CONSTANT,),
        {"callbacks": ["[lr_monitor,speed_monitor]", "[speed_monitor,lr_monitor]"]},
        "order of callbacks",
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_acts_from_the_start_or_is_unknown_is_not_shared(case: str, own: None):
    arguments, swept, why = ALONE[case]
    tree = tree_of(*arguments, **swept)
    assert starts(tree) == [0, 0] and not tree.nodes and all(one.parent is None for one in tree.branches)
    assert all(why in one.why for one in tree.branches), [one.why for one in tree.branches]


def test_a_users_class_that_says_what_it_does_is_shared(own: None):
    arguments = (*CONSTANT, "+callbacks.late._target_=own_parts.Late", "+callbacks.late.start=10")
    assert starts(tree_of(*arguments, **{"+callbacks__late__size": [1, 2]})) == [0, 9]


def test_seeds_have_a_tree_each_and_a_single_job_has_none():
    tree = tree_of(*MLP, "scheduler=warmup_stable_decay", seed=[0, 1], scheduler__alpha_f=[0, 0.1])
    assert [one.parent for one in tree.branches] == [None, 0, None, 2]
    (alone,) = tree_of(*MLP).branches
    assert (alone.parent, alone.why) == (None, "")


def test_the_length_of_a_run_matters_to_what_mentions_it():
    files = Path(__file__).parents[3].glob("algorithms/[!_]*.py")
    known = {one.stem: looks_at_length(import_module(f"runner.algorithms.{one.stem}").__name__) for one in files}
    looking = {name for name, looks in known.items() if looks}
    assert {"gyro_dropout", "batch_size_warmup", "info_batch", "schedule_free", "spike_guard", "ema"} <= looking
    assert {"mixup", "cutmix", "label_smoothing", "batch_augment", "gradient_clipping", "cutout"} & looking == set()


def test_a_moment_knows_neither_samples_nor_seconds():
    with composing():
        config = to_plain(compose("config", [*CONSTANT]))
    moment = Foreseen(0, config).moment
    assert moment.max_duration == "5ep"
    moment.timestamp = moment.timestamp._replace(sample=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        moment.progress.elapsed_in("sp")
