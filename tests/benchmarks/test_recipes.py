"""The comparison of recipes reports which of them exceed their limits."""

from __future__ import annotations

from types import ModuleType

import pytest


def results_of(runs: ModuleType, *means: tuple[float, float]) -> list[list[object]]:
    """Return two results for each recipe, with this mean error and these seconds of CPU time."""
    return [[runs.Result(error + noise, seconds) for noise in (-0.001, 0.001)] for error, seconds in means]


@pytest.mark.parametrize(
    ("fast", "passed"),
    [((0.019, 4.0), True), ((0.020, 5.0), True), ((0.021, 4.0), False), ((0.019, 5.1), False)],
    ids=["within limits", "at the limits", "worse", "too slow"],
)
def test_a_recipe_must_keep_the_limits_of_its_metric_and_time(
    recipes: ModuleType, runs: ModuleType, capsys: pytest.CaptureFixture[str], fast: tuple[float, float], passed: bool
):
    names = (recipes.Recipe("digits_plain"), recipes.Recipe("digits_fast", 3, 2))
    task = recipes.Task("accuracy, %", "epochs", 2, names)
    assert recipes.report(task, results_of(runs, (0.020, 10.0), fast)) == passed
    plain, other = capsys.readouterr().out.splitlines()[1:3]
    assert plain.split() == ["digits_plain", "98.000", "+-", "0.141", "16", "1.0x", "10.00", "1.0x"]
    assert other.endswith("misses a limit") != passed


def test_a_recipe_with_too_large_a_budget_misses_its_limit(
    recipes: ModuleType, runs: ModuleType, capsys: pytest.CaptureFixture[str]
):
    task = recipes.Task("accuracy, %", "epochs", 2, (recipes.Recipe("digits_plain"), recipes.Recipe("digits_fast", 9)))
    assert not recipes.report(task, results_of(runs, (0.020, 10.0), (0.019, 1.0)))


@pytest.mark.slow
def test_recipes_are_compared_on_the_same_data_with_the_limits_that_the_docs_claim(recipes: ModuleType):
    digits, language = recipes.TASKS
    assert [(recipe.name, recipe.budget_factor, recipe.time_factor) for recipe in digits.recipes[1:]] == [
        ("digits_fast", 3, 2),
        ("digits_muon", 3, 2),
    ]
    assert language.recipes[1].budget_factor == pytest.approx(1 / 0.6)
    assert (language.recipes[2].budget_factor, language.recipes[2].time_factor) == (4, 3)
    for task in (digits, language):
        plain, *others = (recipes.compose([f"experiment={recipe.name}"]) for recipe in task.recipes)
        assert all(config["data"]["_target_"] == plain["data"]["_target_"] for config in others)
        assert task.recipes[0].budget() == {"epochs": 16, "bytes": 1_000_000}[task.unit]
