"""Tables and the plot of a sweep, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from runner.runs.result import Result
from runner.sweeps.job import name_job, show_value
from runner.sweeps.plan import short_names
from runner.sweeps.plot import draw
from runner.sweeps.summary import average, compare, tabulate
from runner.sweeps.sweep import Sweep


def result(objective: float | None, *overrides: str, status: str = "FINISHED", lower: bool = False) -> Result:
    metrics = {} if objective is None else {"train/acc": 0.5, "eval/acc": objective}
    name = "-".join(one.partition("=")[2] for one in overrides)
    return Result(status, name, "id", [*overrides, "model=mlp"], objective, "eval/acc", lower, metrics, seconds=1.234)


def sweep(direction: str = "") -> Sweep:
    return Sweep(Path("folder"), "id", "name", "identity", ["model"], direction=direction)


GRID = [
    result(0.5, "optimizer.lr=0.01", "seed=0"),
    result(0.7, "optimizer.lr=0.01", "seed=1"),
    result(0.9, "optimizer.lr=0.1", "seed=0"),
    result(math.nan, "optimizer.lr=0.1", "seed=1"),
    result(None, "optimizer.lr=1.0", "seed=0", status="FAILED"),
    result(0.8, "optimizer.lr=1.0", "seed=1"),
]


def test_jobs_are_sorted_by_the_objective_with_those_that_have_none_last():
    columns, rows = tabulate(compare(GRID, sweep()))
    assert columns == ["job", "lr", "seed", "eval/acc", "train/acc", "seconds", "status"]
    assert [row[:4] for row in rows[:4]] == [
        ["0.1-0", 0.1, 0, 0.9],
        ["1.0-1", 1.0, 1, 0.8],
        ["0.01-1", 0.01, 1, 0.7],
        ["0.01-0", 0.01, 0, 0.5],
    ]
    assert math.isnan(rows[4][3]) and rows[4][-2:] == [1.23, "FINISHED"]
    assert rows[5] == ["1.0-0", 1.0, 0, None, None, 1.23, "FAILED"]


@pytest.mark.parametrize(("direction", "lower", "best"), [("", False, 0.9), ("", True, 0.5), ("minimize", False, 0.5)])
def test_what_is_better_is_said_by_the_metric_unless_the_sweeper_says_it(direction: str, lower: bool, best: float):
    jobs = [result(value, f"seed={seed}", lower=lower) for seed, value in enumerate((0.7, 0.5, 0.9))]
    assert compare(jobs, sweep(direction))[0].result.objective == best


def test_means_and_spreads_are_over_seeds_alone():
    columns, rows = average(compare(GRID, sweep())) or ([], [])
    assert columns == ["lr", "mean eval/acc", "spread", "seeds"]
    assert rows == [
        [0.1, 0.9, None, 1],
        [1.0, 0.8, None, 1],
        [0.01, pytest.approx(0.6), pytest.approx(0.02**0.5), 2],  # the sample standard deviation
    ]
    without_seeds = [result(0.5, "optimizer.lr=0.01"), result(0.6, "optimizer.lr=0.1")]
    assert average(compare(without_seeds, sweep())) is None


@pytest.mark.parametrize(
    "results",
    [
        GRID,
        [result(0.5 + seed / 10, f"seed={seed}") for seed in range(3)],
        [result(0.5, "seed=0")],
        [result(a + b, f"model.name={'xyz'[a]}", f"algorithms=[one{b}]") for a in range(3) for b in range(2)],
        [result(value, f"a={value}", f"b={2 * value}", "c=null", f"d={value > 0.2}") for value in (0.1, 0.2, 0.3)],
    ],
    ids=["grid", "seeds", "one", "names", "many"],
)
def test_every_kind_of_sweep_has_a_picture(results: list[Result], tmp_path: Path):
    path = tmp_path / "comparison.png"
    draw(compare(results, sweep()), "eval/acc", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_keys_are_shown_as_short_as_they_differ():
    assert short_names(["optimizer.lr", "seed"]) == {"optimizer.lr": "lr", "seed": "seed"}
    keys = ["optimizer.lr", "model.lr", "lr", "+a.optimizer.lr"]
    assert [*short_names(keys).values()] == ["optimizer.lr", "model.lr", "lr", "a.optimizer.lr"]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["optimizer.lr=0.01", "seed=1"], "digits-lr0.01-seed1"),
        (["seed=1", "optimizer.lr=1e-2"], "digits-lr0.01-seed1"),
        (["optimizer=adamw", "+callbacks=[a,b]"], "digits-a+b-adamw"),
        (["trainer.precision=amp_bf16", "optimizer.nesterov=true"], "digits-nesterov_true-precision_amp_bf16"),
        (["trainer.max_duration=3ep", "data.limit=null"], "digits-limit_null-max_duration3ep"),
        (["trainer.load_path='a b/c:d'"], "digits-load_path_a-b-c-d"),
        (["data=digits"], "digits"),
        (["model=mlp"], "digits"),
        ([], "digits"),
    ],
)
def test_a_job_is_named_by_what_is_its_own(overrides: list[str], name: str):
    fixed = ["model"]
    assert name_job(overrides, None, fixed, {"data": "digits"}) == name
    named = name_job(overrides, "mine", fixed, {"data": "digits"})
    assert named == (name.replace("digits", "mine", 1) if "data=digits" not in overrides else "mine-digits")


def test_a_long_name_is_cut_and_still_its_own():
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
        (7, "7"),
    ],
)
def test_values_are_shown_as_typed(value: Any, shown: str):
    assert show_value(value) == shown
