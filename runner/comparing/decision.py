"""Compares the means of two samples: tests, confidence intervals, and the number of values needed to decide.

This file knows nothing about runs. All functions are pure, and draw from generators with fixed seeds, so the same
numbers give the same answer. The two values of a pair share everything except what is compared, such as the seed.

`scipy.stats` gives the same p-values, and the tests compare with it. But it takes 0.9 s to import and is much slower:
for two samples of ten values, 2 s instead of 3 ms. Its BCa interval is not expanded, and it always draws resamples,
even if there are few enough to enumerate.

Sources, cited below by name:
    Fisher, The Design of Experiments, 1935; Pitman, Significance tests which may be applied to samples from any
    populations, 1937; Phipson and Smyth, Permutation p-values should never be zero, 2010 (arXiv:1603.05766).
    Efron, Better bootstrap confidence intervals, 1987; Hesterberg, What teachers should know about the bootstrap, 2014
    (arXiv:1411.5279).
    Holm, A simple sequentially rejective multiple test procedure, 1979; Hsu, Constrained simultaneous confidence
    intervals for multiple comparisons with the best, 1984.
    Abramowitz and Stegun, Handbook of Mathematical Functions, 1964.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from runner.comparing.evidence import anytime_interval, anytime_p

LEVEL = 0.05
"""The probability that a test finds a difference although the means are equal."""
POWER = 0.8
"""The probability that a test with the recommended number of values finds the difference."""
MOST_FLIPPED = 20  # up to this number of pairs, all sign patterns are tried
MOST_SPLITS = 200_000  # up to this number of ways to divide values in two, all are tried
DRAWS = 50_000  # random sign patterns or divisions otherwise
BLOCK = 10_000_000  # random numbers drawn at a time
MOST_RESAMPLES = 400_000  # up to this number of distinct resamples, all are enumerated: of 11 values, or of 6 and 6
RESAMPLES = 9_999  # random resamples otherwise
MOST_NEEDED = 1_000  # more runs than anyone would train
SIMULATED = 10  # up to this number of pairs, or of values in both samples together, power is simulated
DATASETS = 4_000  # simulated at a time
NORMAL = NormalDist()
ROUNDING = 1e-9


class Anytime(NamedTuple):
    """Statistics of paired differences that stay valid if someone checks after every pair, see `evidence`.

    Attributes:
        p: two-sided p-value, corrected for the number of comparisons.
        interval: bounds of the 95 % confidence sequence; None with too few pairs.
    """

    p: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Decision:
    """Statistics of the difference between the means of two samples.

    Attributes:
        is_paired: whether the values are pairs.
        n: numbers of values in the first and in the second sample; equal if paired.
        means: means of the first and of the second sample.
        interval: bounds of the 95 % confidence interval of the second mean minus the first; None below two values.
        effect: the difference divided by the standard deviation, of the differences if paired; NaN below two values.
        p: two-sided p-value, corrected for the number of comparisons.
        smallest_p: the smallest p-value that this number of values can have, with the same correction.
        more: number of further values of each sample that would detect a difference of this size with 80 % power; None
            if more than a thousand values are needed, or if the effect is unknown.
        anytime: the p-value and interval that are valid at every look; None if not paired.
    """

    is_paired: bool
    n: tuple[int, int]
    means: tuple[float, float]
    interval: tuple[float, float] | None
    effect: float
    p: float
    smallest_p: float
    more: int | None = None
    anytime: Anytime | None = None

    @property
    def difference(self) -> float:
        """The second mean minus the first."""
        return self.means[1] - self.means[0]

    @property
    def is_decided(self) -> bool:
        """Whether the test finds that the means differ."""
        return self.p <= LEVEL


class Samples(NamedTuple):
    """Two samples to compare.

    Attributes:
        a: values of the first sample, finite, at least one.
        b: values of the second sample, finite, at least one.
        pairs: for each pair, the key of its two values as text; empty if the values are not paired.
    """

    a: Sequence[float]
    b: Sequence[float]
    pairs: Sequence[str] = ()


def pair_values(first: Mapping[str, float], second: Mapping[str, float]) -> Samples:
    """Return values with equal keys as pairs, if there are two or more or no other values; otherwise all, unpaired.

    Pairs are in the order of their keys, numbers by value, so that evidence does not depend on who lists the runs.
    """
    keys = sorted((key for key in first if key in second), key=_by_number)
    if len(keys) > 1 or len(first) == len(second) == len(keys):
        return Samples([first[key] for key in keys], [second[key] for key in keys], keys)
    return Samples([*first.values()], [*second.values()])


def decide(samples: Sequence[Samples]) -> list[Decision]:
    """Return a decision about each of several comparisons, corrected for their number by Holm's method."""
    tests = [_test(np.asarray(both.a, float), np.asarray(both.b, float), bool(both.pairs)) for both in samples]
    count = len(tests)
    decisions = []
    anytime = holm([test.anytime.p if test.anytime is not None else 1.0 for test in tests])
    for test, p, valid in zip(tests, holm([test.p for test in tests]), anytime, strict=True):
        more = 0
        if p > LEVEL:
            needed = count_needed(test.effect, LEVEL / count, test.is_paired)
            more = None if needed is None else max(needed - min(test.n), 1)
        at_any_look = None if test.anytime is None else test.anytime._replace(p=valid)
        smallest = min(1.0, test.smallest_p * count)
        decisions.append(replace(test, p=p, smallest_p=smallest, more=more, anytime=at_any_look))
    return decisions


def find_ties(samples: Sequence[Samples]) -> list[bool]:
    """Return for each setting that is compared with the leader whether it may have the best true mean instead.

    The leader and its ties contain the setting with the best true mean in at least 95 % of all cases, although the same
    values chose the leader: the true best is missed only if it tests worse than whichever of the k others leads. Each
    of these k events has a probability of at most LEVEL / k, so their union has at most LEVEL (Hsu 1984).
    """
    return [
        _p_value(np.asarray(both.a, float), np.asarray(both.b, float), bool(both.pairs)) > LEVEL / len(samples)
        for both in samples
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected so that the probability of any wrong rejection is at most the level.

    When the k smallest of m p-values are rejected rightly, at most m - k hypotheses are true. So the next p-value is
    multiplied by m - k, as Bonferroni would for these alone, and is at least as large as the ones before (Holm 1979).
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def flip_signs(differences: np.ndarray) -> float:
    """Return the two-sided p-value of the hypothesis that paired differences `(n,)` have the mean 0.

    If the two values of a pair could just as well be swapped, both signs of each difference, and so all 2^n sign
    patterns, are equally likely. So p is the fraction of patterns with at least the observed |sum| (Fisher 1935).
    With random patterns, the observed one counts as well: p is (1 + count) / (1 + draws) (Phipson and Smyth 2010).
    """
    observed = abs(differences.sum()) * (1 - ROUNDING)
    if len(differences) <= MOST_FLIPPED:
        sums = np.zeros(1)
        for difference in differences:
            sums = np.concatenate([sums + difference, sums - difference])
        return float(np.mean(np.abs(sums) >= observed))
    generator = np.random.default_rng(0)
    count = 0
    for rows in _blocks(DRAWS, len(differences)):
        signs = 2.0 * generator.integers(0, 2, (rows, len(differences))) - 1
        count += int(np.sum(np.abs(signs @ differences) >= observed))
    return (1 + count) / (1 + DRAWS)


def permute(a: np.ndarray, b: np.ndarray) -> float:
    """Return the two-sided p-value of the hypothesis that samples `(n,)` and `(m,)` have one distribution.

    If so, all comb(n + m, n) ways to divide the pooled values are equally likely. With the pooled mean subtracted, both
    parts have opposite sums, so the difference of means is the sum of one part times 1/n + 1/m, and p is the fraction
    of divisions with at least the observed |sum| (Pitman 1937). Random divisions count as in `flip_signs`.
    """
    few, many = sorted([a, b], key=len)
    pooled = np.concatenate([few, many])
    pooled = pooled - pooled.mean()
    observed = abs(pooled[: len(few)].sum()) * (1 - ROUNDING)
    if math.comb(len(pooled), len(few)) <= MOST_SPLITS:
        sums = [np.zeros(1), *(np.zeros(0) for _ in few)]  # of all subsets of the values so far, by size
        for value in pooled:
            sums[1:] = [np.concatenate([without, smaller + value]) for smaller, without in itertools.pairwise(sums)]
        return float(np.mean(np.abs(sums[-1]) >= observed))
    generator = np.random.default_rng(0)
    count = 0
    for rows in _blocks(DRAWS, len(pooled)):
        shuffled = generator.permuted(np.broadcast_to(pooled, (rows, len(pooled))), axis=1)
        count += int(np.sum(np.abs(shuffled[:, : len(few)].sum(axis=1)) >= observed))
    return (1 + count) / (1 + DRAWS)


def bootstrap(*samples: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of a mean, or of the mean of a second sample minus that of the first.

    BCa (Efron 1987): the bounds are the quantiles Phi(b + (b + z) / (1 - a (b + z))) of the estimates of resamples. The
    bias b is Phi^-1 of the fraction of resamples below the estimate, plus half of those equal to it. The skew a is
    sum(u^3) / (6 sum(u^2)^1.5), with the influence u of each value on the estimate. In place of the normal quantiles,
    z is +-sqrt(n / f) t(f), with f degrees of freedom: a bootstrap of n values has sqrt(f / n) times the standard error
    and no tails of Student's t (Hesterberg 2014, "expanded").

    Returns:
        The bounds; None if a sample has fewer than two values.
    """
    sizes = [len(sample) for sample in samples]
    if min(sizes) < 2:
        return None
    signs = [1.0] if len(samples) == 1 else [-1.0, 1.0]
    estimate = sum(sign * float(sample.mean()) for sign, sample in zip(signs, samples, strict=True))
    influence = np.concatenate(
        [sign * (sample - sample.mean()) / len(sample) for sign, sample in zip(signs, samples, strict=True)]
    )
    second = float(np.sum(influence**2))
    third = float(np.sum(influence**3))
    tolerance = ROUNDING * (abs(estimate) + math.sqrt(second))
    if second <= tolerance**2:
        return estimate, estimate
    resampled = np.zeros(1)
    weights = np.ones(1)  # probabilities of the resamples
    if math.prod(math.comb(2 * size - 1, size) for size in sizes) <= MOST_RESAMPLES:
        for sign, sample in zip(signs, samples, strict=True):
            means, probabilities = _enumerate_means(sample)
            resampled = np.add.outer(resampled, sign * means).ravel()
            weights = np.multiply.outer(weights, probabilities).ravel()
    else:
        generator = np.random.default_rng(0)
        weights = np.full(RESAMPLES, 1 / RESAMPLES)
        for sign, sample in zip(signs, samples, strict=True):
            resampled = resampled + sign * _draw_means(sample, generator)
    below = weights @ (resampled < estimate - tolerance) + weights @ (np.abs(resampled - estimate) <= tolerance) / 2
    bias = NORMAL.inv_cdf(float(np.clip(below, 1 / RESAMPLES, 1 - 1 / RESAMPLES)))
    skew = third / (6 * second**1.5)
    freedom = sum(sizes) - len(sizes)
    expanded = math.sqrt(sum(sizes) / freedom) * student_quantile(1 - LEVEL / 2, freedom)
    levels = [NORMAL.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-expanded, expanded)]
    order = np.argsort(resampled)
    low, high = np.searchsorted(np.cumsum(weights[order])[:-1], levels)  # quantiles of a discrete distribution
    return float(resampled[order[low]]), float(resampled[order[high]])


def _enumerate_means(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each distinct resample of `(n,)` values, and its probability: `(comb(2n - 1, n),)` each.

    A resample with `c_i` copies of value i comes from `n! / (c_1! ... c_n!)` of the `n**n` sequences of draws. The loop
    adds the values one by one, each with 0 to n copies.
    """
    size = len(sample)
    sums = [np.zeros(1), *(np.zeros(0) for _ in sample)]  # of the resamples so far, by their number of draws
    orders = [np.ones(1), *(np.zeros(0) for _ in sample)]  # products of 1 / c_i!
    for value in sample:
        counts = [range(drawn + 1) for drawn in range(size + 1)]
        sums = [np.concatenate([sums[max(c) - copies] + copies * value for copies in c]) for c in counts]
        orders = [np.concatenate([orders[max(c) - copies] / math.factorial(copies) for copies in c]) for c in counts]
    return sums[size] / size, orders[size] * math.factorial(size) / size**size


def _draw_means(sample: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the means of random resamples of `(n,)` values, `(RESAMPLES,)`."""
    size = len(sample)
    uniform = np.full(size, 1 / size)
    means = [generator.multinomial(size, uniform, rows) / size @ sample for rows in _blocks(RESAMPLES, size)]
    return np.concatenate(means)


def smallest_p(n: int, m: int | None = None) -> float:
    """Return the smallest possible p-value of a test of `n` pairs, or of samples of `n` and `m` values.

    Of 2^n sign patterns, two have the largest |sum|: all signs equal. Of all divisions, only the one into smallest and
    largest values has it and, if the samples have equal sizes, the same division with the samples swapped.
    """
    if m is None:
        exact = 2.0 ** (1 - n)
        return exact if n <= MOST_FLIPPED else 1 / (1 + DRAWS)
    splits = math.comb(n + m, n)
    return (2 if n == m else 1) / splits if splits <= MOST_SPLITS else 1 / (1 + DRAWS)


def count_needed(effect: float, level: float = LEVEL, is_paired: bool = True) -> int | None:
    """Return the number of values per sample that detect a difference between normal distributions with 80 % power.

    Args:
        effect: the true difference divided by the standard deviation; NaN if it is unknown.
        level: the level of the test.
        is_paired: whether the values are pairs.

    Returns:
        The number; None if it is more than a thousand, or if the effect is unknown.
    """
    if math.isnan(effect) or find_power(effect, MOST_NEEDED, level, is_paired) < POWER:
        return None
    return next(n for n in range(2, MOST_NEEDED + 1) if find_power(effect, n, level, is_paired) >= POWER)


def find_power(effect: float, n: int, level: float = LEVEL, is_paired: bool = True) -> float:
    """Return the probability that a test of `n` values per sample detects a difference, as in `count_needed`.

    With many values, the tests here are about as powerful as Student's. Its statistic has a noncentral t distribution,
    with f degrees of freedom and the shift effect sqrt(n), or effect sqrt(n / 2) for two samples, and is below c with a
    probability of about Phi((c (1 - 1 / 4f) - shift) / sqrt(1 + c^2 / 2f)) (Abramowitz and Stegun, 26.7.10).
    """
    effect = abs(effect)
    if smallest_p(n, None if is_paired else n) > level:
        return 0.0
    if math.isinf(effect):
        return 1.0
    if (n if is_paired else 2 * n) <= SIMULATED:
        return _simulate_power(effect, n, level, is_paired)
    freedom = n - 1 if is_paired else 2 * n - 2
    shift = effect * math.sqrt(n if is_paired else n / 2)
    critical = student_quantile(1 - level / 2, freedom)
    return NORMAL.cdf((shift - critical * (1 - 1 / (4 * freedom))) / math.sqrt(1 + critical**2 / (2 * freedom)))


def _simulate_power(effect: float, n: int, level: float, is_paired: bool) -> float:
    """Return the fraction of simulated data sets that the exact test rejects: few values allow only few p-values."""
    if is_paired:
        # The last sign is fixed, because the opposite pattern has the same |sum|.
        patterns = 1 - 2 * (np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1)
    else:
        divisions = [*itertools.combinations(range(2 * n), n)]
        patterns = np.full((len(divisions), 2 * n), -1)
        np.put_along_axis(patterns, np.asarray(divisions), 1, axis=1)
    values = np.random.default_rng(0).standard_normal((DATASETS, SIMULATED))[:, : patterns.shape[1]]
    values[:, :n] += effect
    sums = np.abs(values @ patterns.T)  # column 0 is the observed sum
    return float(np.mean(np.mean(sums >= sums[:, :1] * (1 - ROUNDING), axis=1) <= level))


def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy.special import stdtrit  # takes 0.1 s, and sweeps do not need it

    return float(stdtrit(freedom, probability))


def _test(a: np.ndarray, b: np.ndarray, is_paired: bool) -> Decision:
    samples = [b - a] if is_paired else [a, b]
    freedom = sum(map(len, samples)) - len(samples)
    difference = b.mean() - a.mean()
    effect = math.nan
    if freedom > 0:
        spread = math.sqrt(sum(float(np.sum((sample - sample.mean()) ** 2)) for sample in samples) / freedom)
        if spread > ROUNDING * abs(difference):
            effect = difference / spread
        else:
            effect = math.copysign(math.inf, difference) if difference else 0.0
    return Decision(
        is_paired=is_paired,
        n=(len(a), len(b)),
        means=(float(a.mean()), float(b.mean())),
        interval=bootstrap(*samples),
        effect=effect,
        p=_p_value(a, b, is_paired),
        smallest_p=smallest_p(len(a)) if is_paired else smallest_p(len(a), len(b)),
        anytime=Anytime(anytime_p(b - a), anytime_interval(b - a, LEVEL)) if is_paired else None,
    )


def _p_value(a: np.ndarray, b: np.ndarray, is_paired: bool) -> float:
    return flip_signs(b - a) if is_paired else permute(a, b)


def _blocks(rows: int, width: int) -> Iterator[int]:
    """Yield the numbers of rows to draw at a time; results do not depend on them."""
    while rows:
        yield (block := min(rows, max(BLOCK // width, 1)))
        rows -= block


def _by_number(key: str) -> list[tuple[float, str]]:
    """Return a sort key for texts such as `3` or `10 mlp`: whole numbers by value, before other words."""
    return [(int(word), "") if word.isdecimal() else (math.inf, word) for word in key.split()]
