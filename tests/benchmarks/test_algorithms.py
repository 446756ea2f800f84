"""The honesty board: its ratios against curves whose ratio is known, and that it leaves no algorithm out."""

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
    """Errors of a method that needs `cost` times the budget, for half, the whole and twice a budget."""
    return [[0.02 * (factor / cost) ** -power * one for one in spread] for factor in (0.5, 1.0, 2.0)]


@pytest.mark.parametrize("cost", [0.3, 1.0, 2.5])
def test_the_ratio_of_power_laws_is_exact(board: ModuleType, cost: float):
    (found,) = board.ratios(power_law(1.0), [power_law(cost)])
    assert (found.value, found.low, found.high) == (pytest.approx(cost),) * 3


def test_the_interval_is_that_of_a_mean(board: ModuleType):
    """For small deviations of a method's seeds, against Student's interval for the mean of n numbers."""
    deviations = (0.004, -0.002, -0.005, 0.001, 0.002)
    (found,) = board.ratios(power_law(1.0, (1.0,) * 5), [power_law(0.5, tuple(1 + one for one in deviations))])
    half = 2.776 * math.sqrt(sum(one**2 for one in deviations) / 4 / 5)
    assert (found.high - found.low) / 2 == pytest.approx(0.5 * half / 0.4, rel=0.2)
    assert found.low < 0.5 < found.high


def test_what_seeds_do_to_both_alike_is_no_error(board: ModuleType):
    spread = (1.0, 1.3, 0.8)
    (found,) = board.ratios(power_law(1.0, spread), [power_law(0.5, spread)])
    assert (found.low, found.high) == (pytest.approx(0.5), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("seeds", "changes", "is_decided"), [(6, 1, True), (5, 1, False), (6, 2, False), (11, 30, True)]
)
def test_a_mark_is_a_verdict_corrected_for_the_number_of_changes(
    board: ModuleType, seeds: int, changes: int, is_decided: bool
):
    """A difference far above its noise is told by six pairs, 2 / 2^6 < 0.05, but not if it is one of two."""
    spread = tuple(1 + 0.01 * (-1) ** seed for seed in range(seeds))
    same = [power_law(1.0, spread)] * (changes - 1)
    found = board.ratios(power_law(1.0, spread), [power_law(0.5, spread), *same])
    assert [one.is_decided for one in found] == [is_decided] + [False] * (changes - 1)


def test_a_plain_recipe_that_more_budget_does_not_help_is_refused(board: ModuleType):
    with pytest.raises(ValueError, match="train more seeds"):
        board.ratios(power_law(1.0, power=-0.1), [power_law(1.0)])


@pytest.mark.parametrize(("value", "shown"), [(0.1, "< 0.25"), (0.251, "0.25 [0.20, 0.30]"), (5.0, "> 4")])
def test_ratios_outside_of_what_was_trained_are_shown_as_such(board: ModuleType, value: float, shown: str):
    assert str(board.Ratio(value, 0.2, 0.3)) == shown


def test_each_algorithm_has_a_row_or_a_reason(board: ModuleType):
    shipped = {path.stem for path in (ROOT / "conf" / "algorithms").glob("*.yaml")} - {"none"}
    first = [change.split()[0] for task in board.TASKS.values() for change in task.changes]
    changed = {re.split("[=.]", one)[-1] for one in first}
    assert shipped <= changed | {*board.NOT_MEASURED}
    assert not changed & {*board.NOT_MEASURED}


@pytest.mark.slow
def test_each_change_composes_and_binds(board: ModuleType, runs: ModuleType):
    for task in board.TASKS.values():
        for change in task.changes:
            build.check(Experiment(runs.compose([f"experiment={task.recipe}", *change.split()])))


def test_a_table_sorts_by_the_larger_budget_and_counts_time(board: ModuleType, runs: ModuleType):
    task = board.Task("plain", "ep", "{} epochs", (8, 64), 7, ("late", "slow"))
    done = {}
    for change, costs, seconds in (("", (1.0, 1.0), 1.0), ("late", (2.0, 0.5), 1.0), ("slow", (1.0, 2.0), 3.0)):
        for budget in task.trained():
            for seed in range(7):
                error = 0.02 * (budget / costs[budget > 16]) ** -0.4
                done[task.run(change, budget, seed)] = runs.Result(error, seconds * budget)
    lines = board.table(task, task.changes, done, range(7)).splitlines()
    assert lines[0] == "| change to `plain`, n=7 | 8 epochs: epochs | CPU time | 64 epochs: epochs | CPU time |"
    half, twice = "0.50 [0.50, 0.50]", "2.00 [2.00, 2.00]"
    assert lines[2:] == [
        f"| `late` | **{twice}** | {twice} | **{half}** | {half} |",
        f"| `slow` | 1.00 [1.00, 1.00] | 3.00 [3.00, 3.00] | **{twice}** | > 4 |",
    ]


def test_a_table_is_put_between_its_marks(board: ModuleType, tmp_path: Path):
    file = tmp_path / "page.md"
    part = "<!-- {}: benchmarks/algorithms.py -->\n{}\n<!-- end -->\n"
    page = f"above\n{part}between\n{part}below\n"
    file.write_text(page.format("digits", "old", "language", "old"))
    board.write("language", "| new \\1 |", file)
    assert file.read_text() == page.format("digits", "old", "language", "| new \\1 |")


@pytest.mark.slow
def test_runs_are_trained_once_and_kept(runs: ModuleType, tmp_path: Path):
    wanted = [runs.Run(TINY, seed) for seed in (0, 1)]
    file = tmp_path / "deep" / "results.jsonl"
    first = runs.results(wanted, 1, file)
    assert len(file.read_text().splitlines()) == 2
    assert all(0 < one.error < 1 and one.seconds > 0 for one in first.values())
    assert runs.results(wanted, 1, file) == first
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_run_that_fails_says_its_command(runs: ModuleType):
    with pytest.raises(ValueError) as caught:
        runs.results([runs.Run((*TINY, "optimizer.lr=-1"), 3)], 1)
    assert f"python -m runner {' '.join(TINY)} optimizer.lr=-1 seed=3" in caught.value.__notes__
