"""What the objectives so far say about each setting: better, worse, equal, or how many seeds are still expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from runner.comparing.decision import LEVEL, holm
from runner.comparing.evidence import anytime_interval, anytime_p, equivalence_p, expected_more, log_wealth

Objectives = Sequence[Sequence[float]]
"""The objectives of each setting with the seeds 0, 1, ...; NaN for a diverged run. Settings may have more or fewer."""


@dataclass(frozen=True)
class Rules:
    """How a decision is made.

    Attributes:
        lower: whether a lower objective is better.
        margin: the largest difference that counts as none; None: settings are never found equal.
        best: whether the best setting is sought by elimination; otherwise each is compared with the first.
        levels: the level of each comparison in a campaign; None: 5 % for all of them together.
    """

    lower: bool
    margin: float | None = None
    best: bool = False
    levels: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Standing:
    """The evidence about one setting in comparison with another. All of it is valid at every look.

    Attributes:
        improvements: for each seed that both have, how much better it is; infinite if one run diverged, `(n,)`.
        p: the p-value, corrected for the number of comparisons unless they are part of a campaign.
        interval: bounds of the improvement; None with too few seeds.
        verdict: 'better', 'worse', 'equal', or empty while it is open.
        more: the number of seeds still expected; None if unknown.
    """

    improvements: np.ndarray
    p: float
    interval: tuple[float, float] | None
    verdict: str
    more: int | None

    @property
    def improvement(self) -> float:
        """The mean improvement over the seeds with which no run diverged; NaN without any."""
        finite = self.improvements[np.isfinite(self.improvements)]
        return float(finite.mean()) if len(finite) else math.nan


def improvements(other: Sequence[float], first: Sequence[float], lower: bool) -> np.ndarray:
    """Return how much better `other` is than `first` with each seed that both have, `(n,)`.

    A diverged run is worse than any other, and equal to a diverged one.
    """
    sign = -1.0 if lower else 1.0
    scores = [[-math.inf if math.isnan(value) else sign * value for value in values] for values in (other, first)]
    return np.array([0.0 if a == b else a - b for a, b in zip(*scores, strict=False)])


def compare_with_first(objectives: Objectives, rules: Rules) -> list[Standing]:
    """Return the standing of each setting but the first, in comparison with the first.

    Holm's method corrects p-values; intervals and claims of equality use the level divided by their number.
    """
    first, *others = objectives
    levels = rules.levels or [LEVEL / len(others)] * len(others)
    samples = [improvements(other, first, rules.lower) for other in others]
    p_values = [anytime_p(sample) for sample in samples]
    if rules.levels is None:
        p_values = holm(p_values)
        decided = [p <= LEVEL for p in p_values]
    else:
        decided = [p <= level for p, level in zip(p_values, levels, strict=True)]
    standings = []
    for sample, p, level, is_decided in zip(samples, p_values, levels, decided, strict=True):
        verdict = ""
        if is_decided:
            verdict = "better" if log_wealth(sample, 1)[-1] > log_wealth(sample, -1)[-1] else "worse"
        elif _are_equal(sample, rules, level):
            verdict = "equal"
        standings.append(Standing(sample, p, anytime_interval(sample, level), verdict, _expected(sample, rules, level)))
    return standings


def find_leader(objectives: Objectives, lower: bool) -> int:
    """Return the index of the setting with the best mean among those with the most seeds; diverged runs are worst."""
    most = max(map(len, objectives))

    def rank(index: int) -> tuple[bool, int, float]:
        values = objectives[index]
        finite = [value for value in values if not math.isnan(value)]
        mean = sum(finite) / len(finite) if finite else math.inf
        return len(values) < most, len(values) - len(finite), mean if lower else -mean

    return min(range(len(objectives)), key=rank)


def compare_with_best(objectives: Objectives, rules: Rules) -> list[Standing]:
    """Return the standing of each setting, in comparison with the leader; the leader itself gets no verdict.

    A setting is worse if any other is better than it. The truly best of k settings is called worse only if one of the
    k - 1 others seems better than it, so each of these tests has the level divided by k - 1, on one side. Equality with
    the leader may be claimed of any pair, so its level is divided by the number of pairs.
    """
    count = len(objectives)
    level = rules.levels[0] if rules.levels else LEVEL
    leader = find_leader(objectives, rules.lower)
    p_values = [1.0] * count
    for index, rival in permutations(range(count), 2):
        p = anytime_p(improvements(objectives[rival], objectives[index], rules.lower), 1)
        p_values[index] = min(p_values[index], p * (count - 1))
    standings = []
    for index, values in enumerate(objectives):
        sample = improvements(values, objectives[leader], rules.lower)
        if index == leader:
            standings.append(Standing(sample, p_values[index], None, "", None))
            continue
        verdict = "worse" if p_values[index] <= level else ""
        if not verdict and _are_equal(sample, rules, 2 * level / (count * (count - 1))):
            verdict = "equal"
        interval = anytime_interval(sample, level / (count - 1))
        standings.append(
            Standing(sample, p_values[index], interval, verdict, _expected(sample, rules, level / (count - 1)))
        )
    return standings


def _are_equal(sample: np.ndarray, rules: Rules, level: float) -> bool:
    return rules.margin is not None and equivalence_p(sample, rules.margin) <= level


def _expected(sample: np.ndarray, rules: Rules, level: float) -> int | None:
    """Return how many more seeds are expected to decide, if they are like those so far; None if unknown."""
    counts = [expected_more(sample, level)]
    if rules.margin is not None:
        sides = [expected_more(rules.margin + sign * sample, level, 1) for sign in (1, -1)]
        counts.append(None if None in sides else max(side for side in sides if side is not None))
    known = [count for count in counts if count is not None]
    return min(known) if known else None
