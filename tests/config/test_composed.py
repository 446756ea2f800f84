"""Top-level keys of a composed config that describe no object are checked like the others."""

from __future__ import annotations

from typing import Any

import pytest
from composed_configs import composed

from runner.config.composed import check_keys
from runner.records import folder as run_folder
from runner.sweeps import sweep


def plain(*overrides: str) -> dict[str, Any]:
    run_folder.register_resolver()
    sweep.register_resolver()
    return composed(*overrides)


@pytest.mark.parametrize("key", ["vars", "init_weights"])
def test_a_key_that_a_run_needs_cannot_be_removed(key: str):
    with pytest.raises(ValueError, match=f"~{key}: a run needs this key"):
        plain(f"~{key}")


@pytest.mark.parametrize("group", ["experiment", "sweep"])
def test_a_recipe_without_the_global_package_is_refused(group: str):
    with pytest.raises(ValueError, match=f"{group}.trainer: has no effect; .*'# @package _global_'"):
        plain(f"+{group}.trainer.max_duration=2ep")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": "outputs/one"}, "resume: no such key"),
        ({"vars": 3}, "vars=3: holds values of your own"),
        ({"init_weights": "at_once"}, "init_weights='at_once': must be in_order"),
        ({"objective": []}, r"objective=\[\]: must be a metric, such as eval/loss"),
        ({"test": "first"}, "test='first': must be best or last, the weights to test"),
        ({"scheduler": 3}, "scheduler=3: choose a file of conf/scheduler/"),
        ({"scheduler": {"foo": 1}}, "scheduler.foo: has no effect"),
    ],
    ids=str,
)
def test_an_unknown_key_or_wrong_value_is_refused(change: dict[str, Any], message: str):
    config = plain()
    check_keys(config)
    with pytest.raises(ValueError, match=message):
        check_keys({**config, **change})
