"""How often verdicts are wrong, how often they find what is there, and how often intervals hold the truth.

    python benchmarks/verdict.py

Each figure is from simulated comparisons of normal values, such as objectives of runs. Exit code 1 says that a figure
is out of its bounds: equals told apart in more than 5 % of all cases, a power more than three points from the
promised one, or an interval from six values on that holds the true mean in less than 92 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from runner.runs.decision import LEVEL, bootstrap, count_needed, find_power, flip_signs, permute, smallest_p

REPEATS = 4_000
SIGMAS = 3  # of what is counted


def share(once: Callable[[np.random.Generator], bool], repeats: int = REPEATS) -> float:
    """Return how often something happens."""
    draw = np.random.default_rng(1)
    return sum(once(draw) for _ in range(repeats)) / repeats


def errors() -> bool:
    """Print how often equals are told apart; return whether that is at most the level."""
    fine = True
    slack = SIGMAS * (LEVEL / REPEATS) ** 0.5
    for n in (5, 6, 8, 10, 12):
        found = share(lambda draw, n=n: flip_signs(draw.standard_normal(n)) <= LEVEL)
        fine &= found <= LEVEL + slack and (found >= 0.03 - slack or smallest_p(n) > LEVEL / 2)
        print(f"equals told apart, {n:2} pairs          {found:.1%}")
    for n, m in ((4, 4), (6, 5), (8, 8)):
        found = share(lambda draw, n=n, m=m: permute(draw.standard_normal(n), draw.standard_normal(m)) <= LEVEL, 1000)
        fine &= found <= LEVEL + SIGMAS * (LEVEL / 1000) ** 0.5
        print(f"equals told apart, {n:2} and {m} unpaired  {found:.1%}")
    return fine


def power() -> bool:
    """Print how often planted differences are found, and the promise; return whether they agree to three points."""
    fine = True
    for effect in (2.0, 1.5, 1.2, 1.0, 0.85):
        n = count_needed(effect) or 0
        found = share(lambda draw, n=n, effect=effect: flip_signs(draw.standard_normal(n) + effect) <= LEVEL, 2000)
        fine &= abs(found - find_power(effect, n)) <= 0.03
        print(f"power at {effect:.2f} sd, {n:2} pairs          {found:.1%}, promised {find_power(effect, n):.1%}")
    return fine


def coverage() -> bool:
    """Print how often intervals hold the true mean; return whether that is often enough from six values on."""

    def holds(draw: np.random.Generator, n: int) -> bool:
        low, high = bootstrap(draw.standard_normal(n)) or (0.0, 0.0)
        return low <= 0 <= high

    fine = True
    for n in (3, 4, 5, 6, 8, 12, 20):
        found = share(lambda draw, n=n: holds(draw, n), 1000)
        fine &= n < 6 or found >= 0.92
        print(f"interval of {n:2} holds the true mean     {found:.1%}")
    return fine


if __name__ == "__main__":
    sys.exit(0 if all([errors(), power(), coverage()]) else 1)
