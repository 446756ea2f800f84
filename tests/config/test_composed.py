"""What may stand in a composed config beside the objects that it describes."""

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


@pytest.mark.parametrize("key", ["mode", "allow_targets", "skip_finished", "allow_divergence", "predict"])
def test_a_key_that_a_run_needs_cannot_be_removed(key: str):
    with pytest.raises(ValueError, match=f"~{key}: a run needs this key"):
        plain(f"~{key}")


@pytest.mark.parametrize("group", ["experiment", "sweep"])
def test_a_recipe_whose_keys_are_not_those_of_the_run_is_refused(group: str):
    with pytest.raises(ValueError, match=f"{group}.trainer: has no effect; .*'# @package _global_'"):
        plain(f"+{group}.trainer.max_duration=2ep")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"predict": {"format": "parqet", "split": "eval"}}, "predict.format='parqet': did you mean 'parquet'"),
        ({"predict": None}, "predict=None: set its keys: predict.format=..."),
        ({"predict": {"format": "pt", "split": 3}}, "predict.split=3: allowed: eval, test, train"),
        ({"predict": {"formt": "pt"}}, "predict.formt: has no effect; did you mean 'format'"),
        ({"predict": {"format": "pt"}}, "~predict.split: mode=predict needs this key"),
        ({"prove": {"kills": 2.5}}, "prove.kills=2.5: must be a whole number"),
        ({"prove": {"keep": 1}}, "prove.keep=1: must be true or false"),
        ({"prove": {"without": "mlflow_logger"}}, "prove.without='mlflow_logger': must be a list of names"),
        ({"prove": {}}, "~prove.batches: mode=prove needs this key"),
        ({"test": "first"}, "test='first': must be best or last, the weights to test"),
        ({"skip_finished": 1}, "skip_finished=1: must be true or false"),
        ({"allow_divergence": None}, "allow_divergence=None: must be true or false"),
        ({"allow_targets": [3]}, r"allow_targets=\[3\]: must be a list of classes"),
        ({"scheduler": 3}, "scheduler=3: choose a file of conf/scheduler/"),
        ({"scheduler": {"foo": 1}}, "scheduler.foo: has no effect"),
    ],
    ids=str,
)
def test_what_cannot_stand_there_is_refused(change: dict[str, Any], message: str):
    config = plain()
    check_keys(config)
    with pytest.raises(ValueError, match=message):
        check_keys({**config, **change})
