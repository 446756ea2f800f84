"""An experiment is checked when it is made and immutable: a change makes a new experiment."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from composed_configs import small_experiment

from runner.config.experiment import Experiment
from runner.distributed.launch import Launch
from runner.failures.errors import WrongKey

HOOKS = {
    "first": {"_target_": "mine.First", "inner": {"_target_": "mine.Inner"}},
    "second": {"_target_": "mine.Second"},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budget": "soon"}, "budget='soon': must be wall-clock time"),
        ({"launch": None}, "launch: none is chosen, and every run needs one"),
        ({"optimizer": {"lr": 1}}, "optimizer={'lr': 1}: needs a `_target_`"),
        ({"callbacks": {"first": None}}, "callbacks.first=None: needs a `_target_`"),
        ({"mode": "eval"}, "mode: no such key"),
    ],
    ids=str,
)
def test_a_wrong_experiment_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(WrongKey) as raised:
        small_experiment(**changed)
    assert str(raised.value).startswith(message)


def test_a_change_returns_a_new_experiment():
    made = small_experiment(callbacks=HOOKS, seed=3)
    other = made.with_trainer(device="cpu", max_duration="1ba").changed(seed=4)
    assert (other.seed, other.trainer.get("device"), other.trainer.get("max_duration")) == (4, "cpu", "1ba")
    assert (made.seed, "device" in made.trainer) == (3, False)
    assert [*made.without_callbacks({"first", "unknown"}).callbacks] == [*made.with_callbacks({"second"}).callbacks]
    assert [*made.callbacks] == ["first", "second"]
    with pytest.raises(FrozenInstanceError):
        made.plain = {}  # type: ignore[misc]


def test_a_parent_is_trained_on_the_devices_of_its_fork():
    parent = small_experiment(seed=1)
    fork = parent.changed(launch={**parent.plain["launch"], "nproc_per_node": 2}, seed=2).with_trainer(device="cpu")
    assert parent.on_devices_of(fork) == fork.changed(seed=1)
    assert parent.launch == Launch() and parent.on_devices_of(fork).launch == Launch(nproc_per_node=2)


def test_sections_are_found_by_path_and_listed_outer_first():
    made = small_experiment(callbacks=HOOKS)
    paths = [section.path for section in made.sections()]
    assert paths.index("callbacks.first") < paths.index("callbacks.first.inner")
    assert made.section_at("callbacks.first.inner").target == "mine.Inner"
    assert (made.callbacks["first"].key, made.scheduler, made.folds) == ("first", None, None)


def test_several_optimizers_are_keyed_by_submodule():
    sgd = {"_target_": "torch.optim.SGD", "_partial_": True}
    assert [*small_experiment(optimizer=sgd).optimizers] == [""]
    several = small_experiment(optimizer={"generator": sgd, "critic": sgd})
    assert {name: section.path for name, section in several.optimizers.items()} == {
        "generator": "optimizer.generator",
        "critic": "optimizer.critic",
    }


def test_experiments_with_the_same_config_are_equal():
    assert Experiment(small_experiment().plain) == small_experiment() != small_experiment(seed=1)
