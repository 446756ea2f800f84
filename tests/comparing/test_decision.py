"""Significance tests, intervals and numbers of seeds: compared with scipy, by hand, and by their error rates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from runner.comparing import decision
from runner.comparing.decision import (
    Samples,
    bootstrap,
    count_needed,
    decide,
    find_power,
    find_ties,
    flip_signs,
    holm,
    pair_values,
    permute,
    smallest_p,
    student_quantile,
)


def paired(a: list[float], b: list[float]) -> Samples:
    return Samples(a, b, [*map(str, range(len(a)))])


def test_values_are_paired_if_they_share_two_keys():
    assert pair_values({"0": 1.0, "1": 2.0, "2": 3.0}, {"1": 5.0, "2": 6.0}) == ([2.0, 3.0], [5.0, 6.0], ["1", "2"])
    assert pair_values({"0": 1.0}, {"0": 2.0}) == ([1.0], [2.0], ["0"])
    assert pair_values({"0": 1.0, "1": 2.0}, {"1": 5.0, "2": 6.0}) == ([1.0, 2.0], [5.0, 6.0], ())


def mean_difference(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(a, axis=axis) - np.mean(b, axis=axis)


@pytest.mark.parametrize("n", [3, 8, 11])
def test_sign_flips_give_the_p_value_of_scipy(n: int):
    values = np.random.default_rng(n).normal(0.5, 1, n)
    expected: Any = scipy.stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=1_000_000)
    assert flip_signs(values) == pytest.approx(expected.pvalue)
    assert flip_signs(np.ones(n)) == smallest_p(n) == 2 / 2**n
    assert flip_signs(np.zeros(n)) == 1.0  # equal values are no evidence


def test_more_than_twenty_pairs_use_random_but_repeatable_sign_flips():
    values = np.random.default_rng(0).normal(0.4, 1, 24)
    exact: Any = scipy.stats.ttest_1samp(values, 0)  # close to the exact test for normal values
    assert flip_signs(values) == flip_signs(values) == pytest.approx(exact.pvalue, rel=0.15)
    assert flip_signs(np.ones(24)) == smallest_p(24)


def test_results_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch):
    a, b = np.random.default_rng(0).normal(0, 1, (2, 24))
    whole = flip_signs(b - a), permute(a, b), bootstrap(a), bootstrap(a, b)
    monkeypatch.setattr(decision, "BLOCK", 20_000)
    assert (flip_signs(b - a), permute(a, b), bootstrap(a), bootstrap(a, b)) == whole


@pytest.mark.parametrize("sizes", [(3, 5), (6, 6), (9, 4)])
def test_permutations_give_the_p_value_of_scipy(sizes: tuple[int, int]):
    draw = np.random.default_rng(1)
    a, b = draw.normal(0, 1, sizes[0]), draw.normal(1, 1, sizes[1])
    observed = abs(a.mean() - b.mean())
    expected: Any = scipy.stats.permutation_test(
        (a, b), lambda a, b, axis: np.abs(mean_difference(a, b, axis)), alternative="greater", vectorized=True
    )
    assert observed and permute(a, b) == pytest.approx(expected.pvalue)
    assert permute(np.arange(sizes[0]), 100.0 + np.arange(sizes[1])) == pytest.approx(smallest_p(*sizes))


def test_random_permutations_are_close_to_a_t_test():
    draw = np.random.default_rng(1)
    a, b = draw.normal(0, 1, 15), draw.normal(0.7, 1, 14)
    expected: Any = scipy.stats.ttest_ind(a, b)
    assert permute(a, b) == pytest.approx(expected.pvalue, rel=0.15)


@pytest.mark.parametrize("sizes", [(8,), (30,), (9, 14)])
def test_the_interval_is_that_of_scipy_at_the_expanded_level(sizes: tuple[int, ...]):
    draw = np.random.default_rng(5)
    samples = [draw.exponential(1.0, size) for size in sizes]
    freedom = sum(sizes) - len(sizes)
    z = math.sqrt(sum(sizes) / freedom) * scipy.stats.t.ppf(0.975, freedom)
    expected = scipy.stats.bootstrap(
        samples if len(samples) == 1 else samples[::-1],
        np.mean if len(samples) == 1 else mean_difference,
        confidence_level=1 - 2 * float(scipy.stats.norm.sf(z)),
        n_resamples=20_000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = expected.high - expected.low
    # The bounds are noisy, because few resamples lie near them.
    assert bootstrap(*samples) == pytest.approx((expected.low, expected.high), abs=0.08 * width)


def bounds_of_all_resamples(*samples: np.ndarray) -> tuple[float, float]:
    """BCa at the expanded level, from every ordered resample; the acceleration comes from a jackknife."""

    def of(*values: np.ndarray) -> float:
        return float(np.mean(values[-1]) - (np.mean(values[0]) if len(values) > 1 else 0))

    means = [np.array([*itertools.product(sample, repeat=len(sample))]).mean(axis=1) for sample in samples]
    resampled = means[0] if len(means) == 1 else np.subtract.outer(means[1], means[0]).ravel()
    distance = resampled - of(*samples)
    below = np.mean((distance < -1e-9) + (np.abs(distance) <= 1e-9) / 2)
    second = third = 0.0
    for index, sample in enumerate(samples):
        left_out = [
            of(*samples[:index], np.delete(sample, i), *samples[index + 1 :]) * (len(sample) - 1) / len(sample)
            for i in range(len(sample))
        ]
        second += np.sum((np.mean(left_out) - np.array(left_out)) ** 2)
        third += np.sum((np.mean(left_out) - np.array(left_out)) ** 3)
    size = sum(map(len, samples))
    freedom = size - len(samples)
    z = math.sqrt(size / freedom) * scipy.stats.t.ppf(0.975, freedom) * np.array([-1, 1])
    bias = scipy.stats.norm.ppf(below)
    shares = scipy.stats.norm.cdf(bias + (bias + z) / (1 - third / (6 * second**1.5) * (bias + z)))
    low, high = np.quantile(resampled, shares, method="inverted_cdf")
    return float(low), float(high)


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (6,), (2, 3), (3, 3)])
def test_the_interval_of_few_values_is_that_of_all_resamples(sizes: tuple[int, ...]):
    draw = np.random.default_rng(7)
    for _ in range(2):
        samples = [draw.exponential(1.0, size) for size in sizes]
        assert bootstrap(*samples) == pytest.approx(bounds_of_all_resamples(*samples))


def test_the_interval_of_negated_values_is_negated():
    values = np.array([0.11, 0.14, 0.09, 0.1, 0.3, 0.12])
    low, high = bootstrap(values) or (0.0, 0.0)
    assert bootstrap(-values) == pytest.approx((-high, -low))


def test_one_value_has_no_interval_and_equal_values_one_of_width_0():
    assert bootstrap(np.array([0.5])) is None and bootstrap(np.ones(4), np.ones(1)) is None
    assert bootstrap(np.full(3, 0.1)) == pytest.approx((0.1, 0.1))


def test_student_quantiles_are_those_of_scipy():
    for freedom in (1, 2, 30):
        assert student_quantile(0.975, freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom))


def test_holm_correction_equals_values_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_decisions_equal_values_by_hand():
    (small,) = decide([paired([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])])
    assert (small.difference, small.p, small.smallest_p, small.n) == (2.0, 0.25, 0.25, (3, 3))
    assert small.effect == 2.0 and not small.is_decided
    assert small.more == 3 and count_needed(2.0) == 6  # the fewest that can decide
    (single,) = decide([paired([1.0], [2.0])])
    assert (single.p, single.interval, single.more) == (1.0, None, None) and math.isnan(single.effect)
    (clear,) = decide([paired([0.0] * 6, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0])])
    assert clear.is_decided and clear.more == 0 and clear.p == 2 / 64


def test_p_values_of_several_comparisons_are_corrected():
    values = paired([0.0] * 6, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    decisions = decide([values, values])
    assert [result.p for result in decisions] == [4 / 64] * 2 and decisions[0].smallest_p == 4 / 64
    assert [result.more for result in decisions] == [1, 1]  # with seven pairs, p can be below 0.025


def test_equal_samples_differ_significantly_in_three_to_five_percent():
    draw = np.random.default_rng(0)
    for n in (6, 8, 10):
        claims = sum(flip_signs(draw.standard_normal(n)) <= 0.05 for _ in range(1000))
        assert 30 <= claims <= 50 or (n == 6 and 20 <= claims <= 45)  # p of six pairs is a multiple of 2/64
    claims = sum(permute(draw.standard_normal(6), draw.standard_normal(5)) <= 0.05 for _ in range(1000))
    assert 30 <= claims <= 50


@pytest.mark.parametrize(("effect", "n"), [(1.5, 6), (1.2, 8), (0.85, 12)])
def test_predicted_power_is_that_of_simulations(effect: float, n: int):
    draw = np.random.default_rng(1)
    power = np.mean([flip_signs(draw.standard_normal(n) + effect) <= 0.05 for _ in range(1000)])
    assert power == pytest.approx(find_power(effect, n), abs=0.03)


def test_the_number_needed_is_the_smallest_with_80_percent_power():
    for effect, is_paired in ((2.0, True), (0.7, True), (0.2, True), (2.5, False), (0.5, False)):
        n = count_needed(effect, is_paired=is_paired)
        assert n is not None and find_power(effect, n, is_paired=is_paired) >= 0.8
        assert find_power(effect, n - 1, is_paired=is_paired) < 0.8
    assert count_needed(0.0) is None and count_needed(0.01) is None and count_needed(math.nan) is None
    assert count_needed(math.inf) == 6 and count_needed(-math.inf, is_paired=False) == 4


@pytest.mark.parametrize("n", [6, 8])
def test_95_percent_of_intervals_contain_the_true_mean(n: int):
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        low, high = bootstrap(draw.standard_normal(n)) or (0, 0)
        covered += low <= 0 <= high
    assert 0.92 <= covered / 300 <= 0.98


def test_the_truly_best_is_first_or_tied_in_95_percent():
    draw = np.random.default_rng(4)
    missed = 0
    for _ in range(500):
        values = draw.standard_normal((4, 8))
        values[0] += 0.05  # the best by a small margin
        order = np.argsort(-values.mean(axis=1))
        ties = find_ties([paired(values[order[0]].tolist(), values[index].tolist()) for index in order[1:]])
        missed += 0 not in [order[0], *(index for index, tied in zip(order[1:], ties, strict=True) if tied)]
    assert missed / 500 <= 0.05
    assert find_ties([paired([1.0] * 3, [0.0] * 3)]) == [True]  # three pairs are too few
