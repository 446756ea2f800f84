"""The benchmark of recipes reports which recipes miss their limits."""

from __future__ import annotations

from types import ModuleType

import pytest


def make_results(runs: ModuleType, *means: tuple[float, float]) -> list[list[object]]:
    """Return two results per recipe, from its mean error and its CPU time in seconds."""
    return [[runs.Result(error + noise, seconds) for noise in (-0.001, 0.001)] for error, seconds in means]


@pytest.mark.parametrize(
    ("fast", "passed"),
    [((0.019, 4.0), True), ((0.020, 5.0), True), ((0.021, 4.0), False), ((0.019, 5.1), False)],
    ids=["within limits", "at the limits", "error too large", "too slow"],
)
def test_a_recipe_must_stay_within_its_limits_of_error_and_time(
    recipes: ModuleType, runs: ModuleType, capsys: pytest.CaptureFixture[str], fast: tuple[float, float], passed: bool
):
    names = (recipes.Recipe("digits_plain"), recipes.Recipe("digits_fast", 3, 2))
    task = recipes.Task("accuracy, %", "epochs", 2, names)
    assert recipes.report(task, make_results(runs, (0.020, 10.0), fast)) == passed
    plain, other = capsys.readouterr().out.splitlines()[1:3]
    assert plain.split() == ["digits_plain", "98.000", "+-", "0.141", "16", "1.0x", "10.00", "1.0x"]
    assert other.endswith("misses a limit") != passed


def test_a_recipe_with_too_large_a_budget_misses_its_limit(
    recipes: ModuleType, runs: ModuleType, capsys: pytest.CaptureFixture[str]
):
    task = recipes.Task("accuracy, %", "epochs", 2, (recipes.Recipe("digits_plain"), recipes.Recipe("digits_fast", 9)))
    assert not recipes.report(task, make_results(runs, (0.020, 10.0), (0.019, 1.0)))


@pytest.mark.slow
def test_recipes_share_their_data_and_have_the_limits_claimed_in_the_docs(recipes: ModuleType):
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
