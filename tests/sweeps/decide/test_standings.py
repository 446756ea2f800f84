"""Decisions from objectives: p values equal those of single comparisons, and diverged runs are the worst."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runner.comparing.decision import LEVEL, holm
from runner.comparing.evidence import anytime_p
from runner.sweeps.decide.contenders import Contender
from runner.sweeps.decide.contest import Contest, Look
from runner.sweeps.decide.outcome import Outcome, describe
from runner.sweeps.decide.standings import Rules, compare_with_best, compare_with_first, find_leader, improvements

NOISE = np.random.default_rng(0).standard_normal((4, 40))


def contest(count: int, best: bool = False, margin: float | None = None) -> Contest:
    """Return a contest between settings named `x=0`, `x=1`, and so on."""
    return Contest([Contender((f"x={index}",)) for index in range(count)], best=best, margin=margin)


def play(means: list[float], best: bool = False, margin: float | None = None, spread: float = 0.5) -> Outcome:
    """Return the outcome of a decision between settings with these true means; higher is better."""
    rules = contest(len(means), best, margin)
    objectives: list[list[float]] = [[] for _ in means]
    while jobs := Look(rules, objectives, False).next_jobs(1):
        for index, seed in jobs:
            objectives[index].append(means[index] + spread * NOISE[index, seed])
    return Outcome(Look(rules, objectives, False))


def test_p_values_are_those_of_the_differences_corrected_by_holm():
    objectives = [[*NOISE[index, :12] + index] for index in range(3)]
    standings = compare_with_first(objectives, Rules(lower=True))
    single = [anytime_p(np.subtract(other, objectives[0])) for other in objectives[1:]]
    assert [standing.p for standing in standings] == holm(single)
    assert standings[1].verdict == "worse" and standings[1].improvement < 0


def test_each_setting_stops_once_it_is_better_or_worse_than_the_first():
    outcome = play([0.0, 3.0, 0.4])
    assert outcome.answer() == "B and C are better than A"
    assert len(outcome.look.objectives[1]) < len(outcome.look.objectives[2]) == len(outcome.look.objectives[0])


def test_the_setting_that_elimination_leaves_is_the_best():
    outcome = play([0.0, 0.5, 3.0], best=True)
    assert outcome.answer() == "C is the best"
    assert find_leader([[1.0, 2.0], [0.0, math.nan], [5.0]], lower=True) == 0


def test_settings_within_the_margin_are_equal_and_end_the_decision():
    assert play([0.0, 0.0], margin=1.0).answer() == "B is equal to A"
    assert play([0.0, 0.0, -4.0], best=True, margin=1.0).answer() == "A and B are equal within the margin"
    undecided = play([0.0, 0.0])
    assert undecided.answer() == "not decided: B" and undecided.look.seeds == 30
    assert any("--max-seeds" in text for _, text in undecided.lines())


def test_a_diverged_run_is_worse_than_finite_ones_and_equal_to_a_diverged_one():
    assert [*improvements([math.nan, 1.0, math.nan], [5.0, math.nan, math.nan], lower=True)] == [-math.inf, math.inf, 0]
    standings = compare_with_first([[1.0] * 6, [math.nan] * 6], Rules(lower=True))
    assert standings[0].verdict == "worse" and standings[0].p == pytest.approx(anytime_p(np.full(6, -1.0)))
    assert compare_with_best([[1.0] * 5, [math.nan] * 5], Rules(lower=True))[1].verdict == "worse"


def test_equal_settings_get_a_verdict_in_at_most_5_percent_of_decisions():
    generator = np.random.default_rng(1)
    wrong = 0
    for _ in range(100):
        objectives = generator.standard_normal((3, 20))
        standings = compare_with_first(objectives.tolist(), Rules(lower=True))  # p is the smallest of all looks
        wrong += any(standing.verdict for standing in standings)
    assert wrong <= 100 * LEVEL + 3 * math.sqrt(100 * LEVEL)


def test_the_next_jobs_are_limited_by_needed_seeds_and_free_workers():
    rules = contest(2)
    assert Look(rules, [[], []], True).next_jobs(1) == [(0, 0), (1, 0)]
    assert len(Look(rules, [[], []], True).next_jobs(100)) == 2 * 6
    assert Look(rules, [[1.0, 1.1], [2.0]], True).next_jobs(1) == [(1, 1)]


def test_a_line_shows_difference_p_and_expected_seeds():
    look = Look(contest(2), [[0.5], [0.25]], lower=True)
    assert describe(look) == "1 seed  B -0.25, p 1, about 5 more"
    assert describe(Look(contest(2), [[0.5] * 6, [0.25] * 6], True)).endswith("p 0.044, better than A")


def test_a_line_counts_diverged_runs_instead_of_showing_nan():
    look = Look(contest(2), [[0.5] * 6, [math.nan] * 6], lower=True)
    assert describe(look) == "6 seeds  B 6 diverged, p 0.044, worse than A"
