"""The recipes side by side: which limits are kept, and what is shown of it."""

from __future__ import annotations

from types import ModuleType

import pytest


def results_of(runs: ModuleType, *means: tuple[float, float]) -> list[list[object]]:
    """Two results of each recipe: an error and seconds of CPU time as their means."""
    return [[runs.Result(error + one, seconds) for one in (-0.001, 0.001)] for error, seconds in means]


@pytest.mark.parametrize(
    ("fast", "kept"),
    [((0.019, 4.0), True), ((0.020, 5.0), True), ((0.021, 4.0), False), ((0.019, 5.1), False)],
    ids=["all kept", "just kept", "worse", "too slow"],
)
def test_limits_are_those_of_metric_and_time(
    recipes: ModuleType, runs: ModuleType, capsys: pytest.CaptureFixture[str], fast: tuple[float, float], kept: bool
):
    names = (recipes.Recipe("digits_plain"), recipes.Recipe("digits_fast", 3, 2))
    task = recipes.Task("accuracy, %", "epochs", 2, names)
    assert recipes.report(task, results_of(runs, (0.020, 10.0), fast)) == kept
    plain, other = capsys.readouterr().out.splitlines()[1:3]
    assert plain.split() == ["digits_plain", "98.000", "+-", "0.141", "16", "1.0x", "10.00", "1.0x"]
    assert other.endswith("misses a limit") != kept


def test_a_budget_that_is_too_large_misses_the_limit(
    recipes: ModuleType, runs: ModuleType, capsys: pytest.CaptureFixture[str]
):
    task = recipes.Task("accuracy, %", "epochs", 2, (recipes.Recipe("digits_plain"), recipes.Recipe("digits_fast", 9)))
    assert not recipes.report(task, results_of(runs, (0.020, 10.0), (0.019, 1.0)))


@pytest.mark.slow
def test_recipes_are_compared_on_one_task_and_with_the_limits_that_we_claim(recipes: ModuleType):
    digits, language = recipes.TASKS
    assert [(one.name, one.less, one.less_time) for one in digits.recipes[1:]] == [
        ("digits_fast", 3, 2),
        ("digits_muon", 3, 2),
    ]
    assert language.recipes[1].less == pytest.approx(1 / 0.6)
    assert (language.recipes[2].less, language.recipes[2].less_time) == (4, 3)
    for task in (digits, language):
        plain, *others = (recipes.compose([f"experiment={one.name}"]) for one in task.recipes)
        assert all(one["data"]["_target_"] == plain["data"]["_target_"] for one in others)
        assert task.recipes[0].budget() == {"epochs": 16, "bytes": 1_000_000}[task.unit]
