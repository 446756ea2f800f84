"""The table of algorithms: its ratios equal those of known curves, and it leaves no algorithm out."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType

import pytest

from runner.config import build
from runner.config.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
TINY = ("model=mlp", "algorithms=none", "data.batch_size=400", "trainer.max_duration=1ep")


def power_law(cost: float, spread: tuple[float, ...] = (1.0, 1.0), power: float = 0.4) -> list[list[float]]:
    """Return the errors of a method that needs `cost` times the budget, for half, the whole and twice a budget."""
    return [[0.02 * (factor / cost) ** -power * noise for noise in spread] for factor in (0.5, 1.0, 2.0)]


@pytest.mark.parametrize("cost", [0.3, 1.0, 2.5])
def test_the_ratio_of_power_laws_is_exact(board: ModuleType, cost: float):
    (ratio,) = board.ratios(power_law(1.0), [power_law(cost)])
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(cost),) * 3


def test_the_interval_of_a_ratio_is_near_student_s_interval_of_a_mean(board: ModuleType):
    """Student's interval for the mean of n numbers holds for small deviations between the seeds of a method."""
    deviations = (0.004, -0.002, -0.005, 0.001, 0.002)
    spread = tuple(1 + deviation for deviation in deviations)
    (ratio,) = board.ratios(power_law(1.0, (1.0,) * 5), [power_law(0.5, spread)])
    half_width = 2.776 * math.sqrt(sum(deviation**2 for deviation in deviations) / 4 / 5)
    assert (ratio.high - ratio.low) / 2 == pytest.approx(0.5 * half_width / 0.4, rel=0.2)
    assert ratio.low < 0.5 < ratio.high


def test_an_effect_of_the_seed_on_both_recipes_does_not_widen_the_interval(board: ModuleType):
    spread = (1.0, 1.3, 0.8)
    (ratio,) = board.ratios(power_law(1.0, spread), [power_law(0.5, spread)])
    assert (ratio.low, ratio.high) == (pytest.approx(0.5), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("seeds", "changes", "is_decided"), [(6, 1, True), (5, 1, False), (6, 2, False), (11, 30, True)]
)
def test_a_ratio_is_decided_with_a_correction_for_the_number_of_changes(
    board: ModuleType, seeds: int, changes: int, is_decided: bool
):
    """Six pairs decide a difference far above its noise, because 2 / 2^6 < 0.05, but not if it is one of two."""
    spread = tuple(1 + 0.01 * (-1) ** seed for seed in range(seeds))
    same = [power_law(1.0, spread)] * (changes - 1)
    ratios = board.ratios(power_law(1.0, spread), [power_law(0.5, spread), *same])
    assert [ratio.is_decided for ratio in ratios] == [is_decided] + [False] * (changes - 1)


def test_a_plain_recipe_that_does_not_improve_with_its_budget_is_refused(board: ModuleType):
    with pytest.raises(ValueError, match="train more seeds"):
        board.ratios(power_law(1.0, power=-0.1), [power_law(1.0)])


@pytest.mark.parametrize(("value", "shown"), [(0.1, "< 0.25"), (0.251, "0.25 [0.20, 0.30]"), (5.0, "> 4")])
def test_ratios_outside_of_the_trained_budgets_are_shown_as_bounds(board: ModuleType, value: float, shown: str):
    assert str(board.Ratio(value, 0.2, 0.3)) == shown


def test_each_algorithm_has_a_row_or_a_reason(board: ModuleType):
    names = {path.stem for path in (ROOT / "conf" / "algorithms").glob("*.yaml")} - {"none"}
    overrides = [change.split()[0] for task in board.TASKS.values() for change in task.changes]
    measured = {re.split("[=.]", override)[-1] for override in overrides}
    assert names <= measured | {*board.NOT_MEASURED}
    assert not measured & {*board.NOT_MEASURED}


@pytest.mark.slow
def test_each_change_composes_and_binds(board: ModuleType, runs: ModuleType):
    for task in board.TASKS.values():
        for change in task.changes:
            build.check(Experiment(runs.compose([f"experiment={task.recipe}", *change.split()])))


def test_a_table_is_sorted_by_the_larger_budget_and_shows_cpu_time(board: ModuleType, runs: ModuleType):
    task = board.Task("plain", "ep", "{} epochs", (8, 64), 7, ("late", "slow"))
    results_by_run = {}
    for change, costs, seconds in (("", (1.0, 1.0), 1.0), ("late", (2.0, 0.5), 1.0), ("slow", (1.0, 2.0), 3.0)):
        for budget in task.trained():
            for seed in range(7):
                error = 0.02 * (budget / costs[budget > 16]) ** -0.4
                results_by_run[task.run(change, budget, seed)] = runs.Result(error, seconds * budget)
    lines = board.table(task, task.changes, results_by_run, range(7)).splitlines()
    assert lines[0] == "| change to `plain`, n=7 | 8 epochs: epochs | CPU time | 64 epochs: epochs | CPU time |"
    half, twice = "0.50 [0.50, 0.50]", "2.00 [2.00, 2.00]"
    assert lines[2:] == [
        f"| `late` | **{twice}** | {twice} | **{half}** | {half} |",
        f"| `slow` | 1.00 [1.00, 1.00] | 3.00 [3.00, 3.00] | **{twice}** | > 4 |",
    ]


def test_a_table_is_written_between_its_marks(board: ModuleType, tmp_path: Path):
    file = tmp_path / "page.md"
    part = "<!-- {}: benchmarks/algorithms.py -->\n{}\n<!-- end -->\n"
    page = f"above\n{part}between\n{part}below\n"
    file.write_text(page.format("digits", "old", "language", "old"))
    board.write("language", "| new \\1 |", file)
    assert file.read_text() == page.format("digits", "old", "language", "| new \\1 |")


@pytest.mark.slow
def test_runs_are_trained_once_and_their_results_kept(runs: ModuleType, tmp_path: Path):
    pair = [runs.Run(TINY, seed) for seed in (0, 1)]
    file = tmp_path / "deep" / "results.jsonl"
    first = runs.results(pair, 1, file)
    assert len(file.read_text().splitlines()) == 2
    assert all(0 < result.error < 1 and result.seconds > 0 for result in first.values())
    assert runs.results(pair, 1, file) == first
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_error_of_a_failed_run_names_its_command(runs: ModuleType):
    with pytest.raises(ValueError) as caught:
        runs.results([runs.Run((*TINY, "optimizer.lr=-1"), 3)], 1)
    assert f"python -m runner {' '.join(TINY)} optimizer.lr=-1 seed=3" in caught.value.__notes__
