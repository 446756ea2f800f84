"""Measure how much cheaper the recipes of conf/experiment/ reach the metric of the plain recipes, in one run.

    python benchmarks/recipes.py

All recipes are trained with the same seeds, which were not used to choose settings, in processes of one thread, and
seed by seed, so that a busy machine affects them alike. The output shows the metric (mean and standard deviation over
seeds), the budget, the CPU time of training, and how many times smaller both are than for the plain recipe. The exit
code is 1 if a recipe is not as cheap as we claim, or its mean metric is worse than that of the plain recipe.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _runs import Result, Run, compose, results, seeds_from

from runner import Time

FIRST_SEED = 2000  # settings were chosen with other seeds


@dataclass(frozen=True)
class Recipe:
    """A file of conf/experiment/, and the least factors by which its budget and CPU time must be smaller."""

    name: str
    budget_factor: float = 1.0
    time_factor: float = 0.0

    def budget(self) -> int:
        """Return the number of epochs or bytes."""
        return int(Time.parse(compose([f"experiment={self.name}"])["trainer"]["max_duration"]).value)


@dataclass(frozen=True)
class Task:
    """Recipes for one target, beginning with the plain one."""

    metric: str
    unit: str
    seeds: int
    recipes: tuple[Recipe, ...]

    def metric_of(self, error: float) -> float:
        """Return the metric for an error: accuracy in %, or bits per byte."""
        return 100 - 100 * error if self.unit == "epochs" else error


TASKS = (
    Task(
        "accuracy, %",
        "epochs",
        10,
        (Recipe("digits_plain"), Recipe("digits_fast", 3, 2), Recipe("digits_muon", 3, 2)),
    ),
    Task(
        "bits per byte",
        "bytes",
        3,
        (Recipe("stdlib_lm_plain"), Recipe("stdlib_lm_trainonly", 1 / 0.6), Recipe("stdlib_lm_fast", 4, 3)),
    ),
)


def report(task: Task, results_by_recipe: Sequence[Sequence[Result]]) -> bool:
    """Print the recipes of a task side by side; return whether they keep their limits.

    Args:
        task: the task of the recipes.
        results_by_recipe: the results of each recipe.
    """
    errors = [statistics.fmean(result.error for result in results_) for results_ in results_by_recipe]
    seconds = [statistics.fmean(result.seconds for result in results_) for results_ in results_by_recipe]
    count = f"n={len(results_by_recipe[0])}"
    print(f"{count:<20} {task.metric:>16} {task.unit:>10} {'less':>6} {'CPU s':>7} {'less':>6}")
    budgets = [recipe.budget() for recipe in task.recipes]
    passed = True
    columns = zip(task.recipes, results_by_recipe, errors, seconds, budgets, strict=True)
    for recipe, results_, error, cpu_seconds, budget in columns:
        spread = statistics.stdev(task.metric_of(result.error) for result in results_)
        budget_factor, time_factor = budgets[0] / budget, seconds[0] / cpu_seconds
        is_cheap = budget_factor >= recipe.budget_factor and time_factor >= recipe.time_factor
        within_limits = error <= errors[0] and is_cheap
        passed &= within_limits
        metric = f"{task.metric_of(error):.3f} +- {spread:.3f}"
        print(
            f"{recipe.name:<20} {metric:>16} {budget:>10,} {budget_factor:>5.1f}x {cpu_seconds:>7.2f} "
            f"{time_factor:>5.1f}x{'' if within_limits else '  misses a limit'}"
        )
    print(flush=True)
    return passed


def main() -> int:
    """Print all figures; exit code 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="number of seeds, at least 2; default: 10 and 3")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help=f"the first seed (default {FIRST_SEED})")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--results", type=Path, help="file of results; only runs that it lacks are trained")
    arguments = parser.parse_args()
    passed = True
    for task in TASKS:
        seeds = seeds_from(arguments.first_seed, arguments.seeds or task.seeds)
        runs = {recipe: [Run((f"experiment={recipe.name}",), seed) for seed in seeds] for recipe in task.recipes}
        in_turn = [run for of_one_seed in zip(*runs.values(), strict=True) for run in of_one_seed]
        trained = results(in_turn, arguments.jobs, arguments.results)
        passed &= report(task, [[trained[run] for run in of_recipe] for of_recipe in runs.values()])
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
