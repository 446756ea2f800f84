"""Anytime-valid evidence; error rates are computed from all sign patterns, not from random ones."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from runner.comparing.decision import LEVEL, Samples, decide, holm, pair_values
from runner.comparing.evidence import BETS, anytime_interval, anytime_p, log_wealth

SIGNS = np.array([*itertools.product([1.0, -1.0], repeat=12)])
SIZES = {
    "normal": np.abs(np.random.default_rng(0).standard_normal(12)),
    "heavy-tailed": np.abs(np.random.default_rng(1).standard_cauchy(12)),
    "accuracies on 600 samples, with ties": np.array([0, 1, 2, 0, 3, 1, 1, 5, 0, 2, 4, 1]) / 600,
    "falling": 2.0 ** -np.arange(12),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("sign", [0, 1, -1])
def test_the_expected_wealth_is_1_after_every_pair_if_both_signs_are_equally_likely(sizes: np.ndarray, sign: int):
    wealth = np.exp(log_wealth(SIGNS * sizes, sign))
    assert wealth.mean(axis=0) == pytest.approx(np.ones(12))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_testing_after_each_pair_has_at_most_5_percent_false_positives(sizes: np.ndarray):
    largest = log_wealth(SIGNS * sizes).max(axis=1)
    assert np.mean(largest >= -math.log(LEVEL)) <= LEVEL


@pytest.mark.parametrize("center", [0.0, 0.3, 2.0])
def test_one_sided_wealth_never_grows_on_average_against_a_center_on_the_other_side(center: float):
    wealth = np.exp(log_wealth(center + SIGNS * SIZES["normal"], sign=-1))
    assert np.all(wealth.mean(axis=0) <= 1 + 1e-12)


def test_wealth_is_the_mean_of_the_products_of_bets():
    differences = np.array([0.3, -0.1, 0.4])
    scale = np.sqrt(np.cumsum(differences**2) / [1, 2, 3])
    up = [math.prod(1 + math.tanh(bet * d / s) for d, s in zip(differences, scale, strict=True)) for bet in BETS]
    down = [math.prod(1 - math.tanh(bet * d / s) for d, s in zip(differences, scale, strict=True)) for bet in BETS]
    assert math.exp(log_wealth(differences)[-1]) == pytest.approx(np.mean(up + down))


def test_six_pairs_with_equal_signs_decide_and_five_cannot():
    assert anytime_p(np.full(6, 0.1)) <= LEVEL < anytime_p(np.full(5, 0.1))
    assert anytime_interval(np.full(5, 0.1), LEVEL) is None
    assert anytime_interval(np.full(6, 0.1), LEVEL) == pytest.approx((0.1, 0.1))


def test_evidence_does_not_depend_on_unit_or_direction_and_ties_are_no_evidence():
    differences = np.random.default_rng(2).normal(1, 1, 9)
    assert anytime_p(-1e-9 * differences) == pytest.approx(anytime_p(differences))
    assert anytime_p(np.zeros(9)) == anytime_p(np.array([])) == 1.0


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_the_interval_excludes_0_when_p_is_below_the_level(mean: float, seed: int):
    differences = np.random.default_rng(seed).normal(mean, 1, 15)
    low, high = anytime_interval(differences, LEVEL) or (-math.inf, math.inf)
    assert (not low <= 0 <= high) == (anytime_p(differences) <= LEVEL)
    assert low < differences.mean() < high


def test_evidence_stays_valid_for_several_candidates_and_needs_pairs():
    generator = np.random.default_rng(3)
    pairs = [Samples([0.0] * 8, [*generator.normal(mean, 1, 8)], [*map(str, range(8))]) for mean in (3, 0, 2)]
    decisions = decide([*pairs, Samples([0.0, 1.0], [2.0, 3.0])])
    alone = [anytime_p(np.asarray(sample.b)) for sample in pairs]
    corrected = [decision.anytime.p for decision in decisions if decision.anytime is not None]
    assert corrected == holm([*alone, 1.0])[:3] and decisions[3].anytime is None


def test_pairs_count_in_the_order_of_their_seeds():
    values = {"10": 1.0, "9": 2.0, "9 mlp": 3.0}
    assert pair_values(values, values).pairs == ["9", "9 mlp", "10"]
