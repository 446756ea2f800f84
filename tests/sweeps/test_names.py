"""Names of jobs, and short forms of keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from runner.sweeps.names import describe, name_job, short_names, show_value


def test_keys_are_as_short_as_possible_and_unique():
    assert short_names(["optimizer.lr", "seed"]) == {"optimizer.lr": "lr", "seed": "seed"}
    keys = ["optimizer.lr", "model.lr", "lr", "+a.optimizer.lr"]
    assert [*short_names(keys).values()] == ["optimizer.lr", "model.lr", "lr", "a.optimizer.lr"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["optimizer.lr=0.01", "seed=1"], "lr0.01-seed1-mlp-digits"),
        (["seed=1", "optimizer.lr=1e-2"], "lr0.01-seed1-mlp-digits"),
        (["optimizer=adamw", "+callbacks=[a,b]"], "a+b-adamw-mlp-digits"),
        (["trainer.precision=amp_bf16", "optimizer.nesterov=true"], "nesterov_true-precision_amp_bf16-mlp-digits"),
        (["trainer.max_duration=3ep", "data.limit=null"], "limit_null-max_duration3ep-mlp-digits"),
        (["trainer.load_path='a b/c:d'"], "load_path_a-b-c-d-mlp-digits"),
        (["data=digits"], "digits-mlp"),
        (["model=gpt", "seed=3"], "gpt-seed3-digits"),
        ([], "mlp-digits"),
    ],
)
def test_a_job_is_named_after_its_values_then_model_and_data(overrides: list[str], name: str):
    choices = {"model": "mlp", "data": "digits"}
    assert name_job(overrides, None, ["data.batch_size"], choices) == name
    assert name_job([*overrides, "data.batch_size=3"], None, ["data.batch_size"], choices, number=2) == f"{name}-2"


def test_a_typed_name_replaces_model_and_data():
    choices = {"model": "mlp", "data": "digits"}
    assert name_job(["seed=1"], "mine", [], choices) == "seed1-mine"
    assert name_job(["run_name=mine", "seed=1"], "mine", [], choices) == "mine-seed1"
    assert name_job(["seed=1"], None, [], {}) == "seed1-own-model-own-data"


def test_a_long_name_is_cut_and_stays_unique():
    def name(letter: str) -> str:
        return name_job([f"+note={'x' * 200}{letter}"], None, [], {"data": "digits"})

    assert len(name("a")) == 100 and name("a")[:90] == name("b")[:90] and name("a") != name("b")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.00012345678, "0.0001235"),
        (True, "true"),
        (None, "null"),
        ([], "none"),
        ([1, "a"], "1+a"),
        ("x", "x"),
        ("a\x1b[31m\nb", "a [31m b"),
        (7, "7"),
    ],
)
def test_values_are_short_and_printable(value: Any, shown: str):
    assert show_value(value) == shown


def test_a_job_is_described_by_its_values_sorted_by_key():
    assert describe({"seed": 1, "optimizer.lr": 0.1, "model": "mlp"}) == "model=mlp lr=0.1 seed=1"
