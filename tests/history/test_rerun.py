"""A rerun merges typed arguments into the recorded ones, and the recorded config with conf/ of today."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kept_runs import LONGER

from runner.history.rerun import merge_config, with_saved_arguments
from runner.history.saved_run import SavedRun

SAVED = ["model=mlp", "optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"]


@pytest.mark.parametrize(
    ("typed", "before", "after"),
    [
        (LONGER, SAVED, [LONGER]),
        ("optimizer.lr=1", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer.lr=1"]),
        ("optimizer=adam", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer=adam"]),
        ("model=gpt", ["optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"], ["model=gpt"]),
        ("callbacks=none", ["model=mlp", "optimizer.lr=0.5"], ["callbacks=none"]),
        ("~callbacks.progress_bar", SAVED[:3], ["~callbacks.progress_bar"]),
        ("~optimizer.lr", SAVED, ["~optimizer.lr"]),
        ("+callbacks=b", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a,b]", "~callbacks.progress_bar"], []),
        ("+callbacks=a", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a]", "~callbacks.progress_bar"], []),
        ("+callbacks=progress_bar", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a,progress_bar]"], []),
    ],
)
def test_a_typed_argument_replaces_the_saved_one(typed: str, before: list[str], after: list[str]):
    saved = SavedRun("x", "x", "x", {}, SAVED)
    assert with_saved_arguments(saved, [typed]) == [*before, *after]
    options = ["-m", "--config-dir", "x"]
    assert with_saved_arguments(saved, [typed, *options]) == [*before, *after, *options]


@pytest.mark.parametrize("added", ["+data.size=3", "++data.size=3"])
def test_a_key_added_by_an_override_is_changed_without_a_plus(added: str):
    config = {"data": {"size": 3}}
    saved = SavedRun("x", "x", "x", config, ["seed=1", added], base=config)
    assert with_saved_arguments(saved, ["data.size=5"]) == ["seed=1", "++data.size=5"]


NOW = {"seed": 0, "new": None, "data": {"size": 9, "more": 1}}
RECORDED = {"seed": 4, "data": {"size": 3, "gone": 2, "of": {"deep": 1}}}


@pytest.mark.parametrize(
    ("typed", "composed", "expected"),
    [
        ([], NOW, RECORDED),  # conf/ has changed since
        (["data.size=5"], NOW | {"data": {"size": 5, "more": 1}}, RECORDED | {"data": RECORDED["data"] | {"size": 5}}),
        (["data.size=9"], NOW, RECORDED | {"data": RECORDED["data"] | {"size": 9}}),  # conf/ now has the same value
        (["+data.x=1"], NOW | {"data": NOW["data"] | {"x": 1}}, RECORDED | {"data": RECORDED["data"] | {"x": 1}}),
        (["~data.gone"], NOW, RECORDED | {"data": {"size": 3, "of": {"deep": 1}}}),
        (["~data"], {key: value for key, value in NOW.items() if key != "data"}, {"seed": 4}),
        (["data=other"], NOW | {"data": {"size": 3}}, RECORDED | {"data": {"size": 3}}),
        (["+callbacks=a"], NOW | {"callbacks": {"a": {}}}, RECORDED | {"callbacks": {"a": {}}}),
        (["+data.of.deep=2"], NOW | {"data": NOW["data"] | {"of": {"deep": 2}}}, None),
    ],
)
def test_only_typed_arguments_change_the_recorded_config(
    typed: list[str], composed: dict[str, Any], expected: dict[str, Any] | None
):
    saved = SavedRun("x", "x", "x", RECORDED, [], NOW)
    before = json.dumps(RECORDED)
    config = merge_config(saved, composed, ["model=mlp", *typed])
    expected = expected or RECORDED | {"data": RECORDED["data"] | {"of": {"deep": 2}}}
    assert config == {"new": None} | expected
    assert json.dumps(RECORDED) == before
