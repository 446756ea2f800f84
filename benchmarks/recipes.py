"""How much cheaper the recipes of conf/experiment/ reach what the plain ones do, all trained in one run.

    python benchmarks/recipes.py

All recipes are trained with the same seeds, which played no part when settings were chosen, in processes of one thread,
and seed by seed, so that they meet the same moments of a busy machine. Printed are the metric (mean and standard
deviation of the seeds), the budget, the CPU time of training, and how many times less both are than the plain recipe's.
A recipe that is not as cheap as we claim, or whose mean metric is worse than the plain one's, gives exit code 1.
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

FIRST_SEED = 2000  # settings were chosen with others


@dataclass(frozen=True)
class Recipe:
    """A file of conf/experiment/, and how many times cheaper than the plain one it must be at least."""

    name: str
    less: float = 1.0
    less_time: float = 0.0

    def budget(self) -> int:
        """Return its epochs, or bytes."""
        return int(Time.parse(compose([f"experiment={self.name}"])["trainer"]["max_duration"]).value)


@dataclass(frozen=True)
class Task:
    """Recipes for one target, the plain one first."""

    metric: str
    unit: str
    seeds: int
    recipes: tuple[Recipe, ...]

    def shown(self, error: float) -> float:
        """Return the metric of an error: accuracy in %, or bits per byte."""
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


def report(task: Task, found: Sequence[Sequence[Result]]) -> bool:
    """Print the recipes of a task side by side; return whether they keep their limits.

    Args:
        task: whose recipes.
        found: the results of each.
    """
    errors = [statistics.fmean(one.error for one in results) for results in found]
    seconds = [statistics.fmean(one.seconds for one in results) for results in found]
    print(f"{'n=' + str(len(found[0])):<20} {task.metric:>16} {task.unit:>10} {'less':>6} {'CPU s':>7} {'less':>6}")
    budgets = [recipe.budget() for recipe in task.recipes]
    kept = True
    for recipe, results_, error, spent, budget in zip(task.recipes, found, errors, seconds, budgets, strict=True):
        spread = statistics.stdev(task.shown(one.error) for one in results_)
        less, less_time = budgets[0] / budget, seconds[0] / spent
        good = error <= errors[0] and less >= recipe.less and less_time >= recipe.less_time
        kept &= good
        metric = f"{task.shown(error):.3f} +- {spread:.3f}"
        print(
            f"{recipe.name:<20} {metric:>16} {budget:>10,} {less:>5.1f}x {spent:>7.2f} {less_time:>5.1f}x"
            f"{'' if good else '  misses a limit'}"
        )
    print(flush=True)
    return kept


def main() -> int:
    """Print all figures; exit code 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="for each recipe, at least 2; default: 10 and 3")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help=f"the first of them (default {FIRST_SEED})")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--results", type=Path, help="keep what was trained in this file, and train only what it lacks")
    arguments = parser.parse_args()
    kept = True
    for task in TASKS:
        seeds = seeds_from(arguments.first_seed, arguments.seeds or task.seeds)
        runs = {recipe: [Run((f"experiment={recipe.name}",), seed) for seed in seeds] for recipe in task.recipes}
        in_turn = [run for of_one_seed in zip(*runs.values(), strict=True) for run in of_one_seed]
        done = results(in_turn, arguments.jobs, arguments.results)
        kept &= report(task, [[done[run] for run in each] for each in runs.values()])
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
