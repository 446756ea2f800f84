from __future__ import annotations

import json
from typing import Any

import pytest
from kept_runs import LONGER

from runner.history.rerun import merge_config, with_saved_arguments
from runner.history.saved_run import SavedRun

KEPT = ["model=mlp", "optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"]


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        (LONGER, KEPT, [LONGER]),
        ("optimizer.lr=1", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer.lr=1"]),
        ("optimizer=adam", ["model=mlp", "+callbacks=a", "~callbacks.progress_bar"], ["optimizer=adam"]),
        ("model=gpt", ["optimizer.lr=0.5", "+callbacks=a", "~callbacks.progress_bar"], ["model=gpt"]),
        ("callbacks=none", ["model=mlp", "optimizer.lr=0.5"], ["callbacks=none"]),
        ("~callbacks.progress_bar", KEPT[:3], ["~callbacks.progress_bar"]),
        ("~optimizer.lr", KEPT, ["~optimizer.lr"]),
        ("+callbacks=b", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a,b]", "~callbacks.progress_bar"], []),
        ("+callbacks=a", ["model=mlp", "optimizer.lr=0.5", "+callbacks=[a]", "~callbacks.progress_bar"], []),
    ],
)
def test_what_is_given_again_replaces_what_was_saved(given: str, before: list[str], after: list[str]):
    saved = SavedRun("x", "x", "x", {}, KEPT)
    assert with_saved_arguments(saved, [given]) == [*before, *after]
    options = ["-m", "--config-dir", "x"]
    assert with_saved_arguments(saved, [given, *options]) == [*before, *after, *options]


@pytest.mark.parametrize("added", ["+data.size=3", "++data.size=3"])
def test_a_key_added_by_an_override_is_changed_without_a_plus(added: str):
    config = {"data": {"size": 3}}
    saved = SavedRun("x", "x", "x", config, ["seed=1", added], base=config)
    assert with_saved_arguments(saved, ["data.size=5"]) == ["seed=1", "++data.size=5"]


NOW = {"seed": 0, "new": None, "data": {"size": 9, "more": 1}}


THEN = {"seed": 4, "data": {"size": 3, "gone": 2, "of": {"deep": 1}}}


@pytest.mark.parametrize(
    ("typed", "composed", "expected"),
    [
        ([], NOW, THEN),  # conf/ has changed since
        (["data.size=5"], NOW | {"data": {"size": 5, "more": 1}}, THEN | {"data": THEN["data"] | {"size": 5}}),
        (["data.size=9"], NOW, THEN | {"data": THEN["data"] | {"size": 9}}),  # conf/ now has the same value
        (["+data.x=1"], NOW | {"data": NOW["data"] | {"x": 1}}, THEN | {"data": THEN["data"] | {"x": 1}}),
        (["~data.gone"], NOW, THEN | {"data": {"size": 3, "of": {"deep": 1}}}),
        (["~data"], {key: value for key, value in NOW.items() if key != "data"}, {"seed": 4}),
        (["data=other"], NOW | {"data": {"size": 3}}, THEN | {"data": {"size": 3}}),
        (["+callbacks=a"], NOW | {"callbacks": {"a": {}}}, THEN | {"callbacks": {"a": {}}}),
        (["+data.of.deep=2"], NOW | {"data": NOW["data"] | {"of": {"deep": 2}}}, None),
    ],
)
def test_what_is_typed_changes_the_record_and_nothing_else_does(
    typed: list[str], composed: dict[str, Any], expected: dict[str, Any] | None
):
    saved = SavedRun("x", "x", "x", THEN, [], NOW)
    before = json.dumps(THEN)
    config = merge_config(saved, composed, ["model=mlp", *typed])
    expected = expected or THEN | {"data": THEN["data"] | {"of": {"deep": 2}}}
    assert config == {"new": None} | expected
    assert json.dumps(THEN) == before
