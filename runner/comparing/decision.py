"""Whether one of two samples has the larger mean: tests, intervals, and how many more values would decide.

This file knows nothing about runs. All functions are pure, and draw from generators with fixed seeds: the same numbers
give the same answer. The two values of a pair share everything except what is compared, such as runs with one seed.

`scipy.stats` gives the same p-values, and the tests compare with it. But it takes 0.9 s to import and is much slower:
for two samples of ten values, 2 s instead of 3 ms. Its BCa interval is not expanded, and it draws resamples where there
are few enough to enumerate.

Sources:
    Sign-flip and permutation tests: Fisher, The Design of Experiments, 1935; Pitman, Significance tests which may be
    applied to samples from any populations, 1937. Drawn at random, p is (1 + count) / (1 + draws): Phipson and Smyth,
    Permutation p-values should never be zero, 2010 (arXiv:1603.05766).
    Intervals: BCa, Efron, Better bootstrap confidence intervals, 1987; at the level that Hesterberg, What teachers
    should know about the bootstrap, 2014 (arXiv:1411.5279) calls expanded, because a bootstrap of few values is narrow.
    Several candidates: Holm, A simple sequentially rejective multiple test procedure, 1979. Against the best of
    several: Hsu, Constrained simultaneous confidence intervals for multiple comparisons with the best, 1984.
    Student's t: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5 and 26.7.10.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.05
"""How often a test may find a difference where there is none."""
POWER = 0.8
"""How often a test that is recommended would find the difference."""
MOST_FLIPPED = 20  # pairs whose signs are all tried
MOST_SPLITS = 200_000  # ways to divide values in two that are all tried
DRAWS = 50_000  # where they are not
BLOCK = 10_000_000  # random numbers drawn at a time
MOST_RESAMPLES = 400_000  # distinct resamples that are all enumerated: of up to 11 values, or of two samples of 6
RESAMPLES = 9_999  # drawn where they are not
MOST_NEEDED = 1_000  # more values than anyone would train
SIMULATED = 10  # up to this number of pairs, or of values in both samples, power is simulated: they have few p-values
DATASETS = 4_000
NORMAL = NormalDist()
ROUNDING = 1e-9


@dataclass(frozen=True)
class Decision:
    """Statistics of the difference between the means of two samples.

    Attributes:
        is_paired: whether the values are pairs.
        n: number of values in the first and in the second sample; of pairs, twice the same.
        means: mean of the first and of the second sample.
        interval: bounds of the 95 % confidence interval of the second mean minus the first; None below two values.
        effect: the difference divided by the standard deviation, of differences if paired; NaN if there is none.
        p: p-value, two-sided; corrected if there are several comparisons.
        smallest_p: the smallest p-value that this number of values can have, corrected likewise.
        more: how many more values of each sample would find a difference as large as this with a power of 80 %; None if
            it would take more than a thousand, or if that is unknown.
    """

    is_paired: bool
    n: tuple[int, int]
    means: tuple[float, float]
    interval: tuple[float, float] | None
    effect: float
    p: float
    smallest_p: float
    more: int | None = None

    @property
    def difference(self) -> float:
        """The second mean minus the first."""
        return self.means[1] - self.means[0]

    @property
    def is_decided(self) -> bool:
        """Whether the means differ."""
        return self.p <= LEVEL


class Samples(NamedTuple):
    """The values of two things that are compared.

    Attributes:
        a: finite values of the first, at least one.
        b: values of the second sample.
        pairs: keys shared by the two values of each pair, as text; empty if the values are not paired.
    """

    a: Sequence[float]
    b: Sequence[float]
    pairs: Sequence[str] = ()


def pair_values(first: Mapping[str, float], second: Mapping[str, float]) -> Samples:
    """Return values with common keys as pairs, if there are at least two or no others; otherwise all values."""
    shared = [key for key in first if key in second]
    if len(shared) > 1 or len(first) == len(second) == len(shared):
        return Samples([first[key] for key in shared], [second[key] for key in shared], shared)
    return Samples([*first.values()], [*second.values()])


def decide(samples: Sequence[Samples]) -> list[Decision]:
    """Return a decision about each of several comparisons, corrected for their number by Holm's method."""
    tested = [_test(np.asarray(one.a, float), np.asarray(one.b, float), bool(one.pairs)) for one in samples]
    count = len(tested)
    adjusted = holm([one.p for one in tested])
    decided = []
    for one, p in zip(tested, adjusted, strict=True):
        more = 0
        if p > LEVEL:
            needed = count_needed(one.effect, LEVEL / count, one.is_paired)
            more = None if needed is None else max(needed - min(one.n), 1)
        decided.append(replace(one, p=p, smallest_p=min(1.0, one.smallest_p * count), more=more))
    return decided


def find_ties(samples: Sequence[Samples]) -> list[bool]:
    """Return for each setting that is compared with the leader whether it may be the best as well.

    The leader and its ties together contain the setting with the best true mean in at least 95 % of all cases, although
    the leader was chosen by these same values: each test has the level divided by the number of comparisons.
    """
    return [
        _p_value(np.asarray(one.a, float), np.asarray(one.b, float), bool(one.pairs)) > LEVEL / len(samples)
        for one in samples
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected so that the chance of any wrong rejection is at most the level."""
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - place)))
        adjusted[index] = largest
    return adjusted


def flip_signs(differences: np.ndarray) -> float:
    """Return the p-value of differences `(n,)` having the mean 0: of all ways to flip signs, how many do as much."""
    observed = abs(differences.sum()) * (1 - ROUNDING)
    if len(differences) <= MOST_FLIPPED:
        sums = np.zeros(1)
        for one in differences:
            sums = np.concatenate([sums + one, sums - one])
        return float(np.mean(np.abs(sums) >= observed))
    generator = np.random.default_rng(0)
    count = 0
    for rows in _blocks(DRAWS, len(differences)):
        signs = 2.0 * generator.integers(0, 2, (rows, len(differences))) - 1
        count += int(np.sum(np.abs(signs @ differences) >= observed))
    return (1 + count) / (1 + DRAWS)


def permute(a: np.ndarray, b: np.ndarray) -> float:
    """Return the p-value of samples `(n,)` and `(m,)` having one mean: of all ways to divide them, how many do so."""
    few, many = sorted([a, b], key=len)
    pooled = np.concatenate([few, many])
    pooled = pooled - pooled.mean()
    observed = abs(pooled[: len(few)].sum()) * (1 - ROUNDING)
    if math.comb(len(pooled), len(few)) <= MOST_SPLITS:
        sums = [np.zeros(1), *(np.zeros(0) for _ in few)]  # of the subsets of each size
        for one in pooled:
            sums[1:] = [np.concatenate([same, less + one]) for less, same in itertools.pairwise(sums)]
        return float(np.mean(np.abs(sums[-1]) >= observed))
    generator = np.random.default_rng(0)
    count = 0
    for rows in _blocks(DRAWS, len(pooled)):
        drawn = generator.permuted(np.broadcast_to(pooled, (rows, len(pooled))), axis=1)
        count += int(np.sum(np.abs(drawn[:, : len(few)].sum(axis=1)) >= observed))
    return (1 + count) / (1 + DRAWS)


def bootstrap(*samples: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean, or of the mean of a second sample minus that of the first.

    All resamples are enumerated if there are at most `MOST_RESAMPLES` distinct ones; otherwise, some are drawn.

    Returns:
        The bounds; None if a sample has fewer than two values.
    """
    sizes = [len(sample) for sample in samples]
    if min(sizes) < 2:
        return None
    signs = [1.0] if len(samples) == 1 else [-1.0, 1.0]
    estimate = sum(sign * float(sample.mean()) for sign, sample in zip(signs, samples, strict=True))
    # The influence of each value on the estimate.
    influence = np.concatenate(
        [sign * (sample - sample.mean()) / len(sample) for sign, sample in zip(signs, samples, strict=True)]
    )
    second = float(np.sum(influence**2))
    third = float(np.sum(influence**3))
    tolerance = ROUNDING * (abs(estimate) + math.sqrt(second))
    if second <= tolerance**2:
        return estimate, estimate
    resampled = np.zeros(1)
    chances = np.ones(1)
    if math.prod(math.comb(2 * size - 1, size) for size in sizes) <= MOST_RESAMPLES:
        for sign, sample in zip(signs, samples, strict=True):
            means, likely = _enumerate_means(sample)
            resampled = np.add.outer(resampled, sign * means).ravel()
            chances = np.multiply.outer(chances, likely).ravel()
    else:
        generator = np.random.default_rng(0)
        chances = np.full(RESAMPLES, 1 / RESAMPLES)
        for sign, sample in zip(signs, samples, strict=True):
            resampled = resampled + sign * _draw_means(sample, generator)
    below = chances @ (resampled < estimate - tolerance) + chances @ (np.abs(resampled - estimate) <= tolerance) / 2
    bias = NORMAL.inv_cdf(float(np.clip(below, 1 / RESAMPLES, 1 - 1 / RESAMPLES)))
    skew = third / (6 * second**1.5)
    freedom = sum(sizes) - len(sizes)
    expanded = math.sqrt(sum(sizes) / freedom) * student_quantile(1 - LEVEL / 2, freedom)
    shares = [NORMAL.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-expanded, expanded)]
    order = np.argsort(resampled)
    low, high = np.searchsorted(np.cumsum(chances[order])[:-1], shares)  # the quantiles of a discrete distribution
    return float(resampled[order[low]]), float(resampled[order[high]])


def _enumerate_means(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each distinct resample of `(n,)` values, and its probability: `(comb(2n - 1, n),)` each.

    A resample that holds value i `c_i` times is drawn in `n! / (c_1! ... c_n!)` of the `n**n` orders.
    """
    size = len(sample)
    sums = [np.zeros(1), *(np.zeros(0) for _ in sample)]  # by how many values are drawn
    orders = [np.ones(1), *(np.zeros(0) for _ in sample)]
    for value in sample:
        counts = [range(drawn + 1) for drawn in range(size + 1)]
        sums = [np.concatenate([sums[max(c) - copies] + copies * value for copies in c]) for c in counts]
        orders = [np.concatenate([orders[max(c) - copies] / math.factorial(copies) for copies in c]) for c in counts]
    return sums[size] / size, orders[size] * math.factorial(size) / size**size


def _draw_means(sample: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the means of random resamples of `(n,)` values, `(RESAMPLES,)`."""
    size = len(sample)
    each = np.full(size, 1 / size)
    drawn = [generator.multinomial(size, each, rows) / size @ sample for rows in _blocks(RESAMPLES, size)]
    return np.concatenate(drawn)


def smallest_p(n: int, m: int | None = None) -> float:
    """Return the smallest p-value that the test of `n` pairs can have, or of samples of `n` and `m` values."""
    if m is None:
        exact = 2.0 ** (1 - n)
        return exact if n <= MOST_FLIPPED else 1 / (1 + DRAWS)
    splits = math.comb(n + m, n)
    return (2 if n == m else 1) / splits if splits <= MOST_SPLITS else 1 / (1 + DRAWS)


def count_needed(effect: float, level: float = LEVEL, is_paired: bool = True) -> int | None:
    """Return how many values per sample detect a difference between normal distributions with 80 % power.

    `effect` is the true difference divided by the standard deviation.

    Returns:
        The number; None if it is more than a thousand, or if the effect is unknown.
    """
    if math.isnan(effect) or find_power(effect, MOST_NEEDED, level, is_paired) < POWER:
        return None
    return next(n for n in _sizes(level, is_paired) if find_power(effect, n, level, is_paired) >= POWER)


def find_power(effect: float, n: int, level: float = LEVEL, is_paired: bool = True) -> float:
    """Return how often a test detects a difference between normal distributions; arguments as in `count_needed`."""
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
    if is_paired:
        patterns = 1 - 2 * (np.arange(2 ** (n - 1))[:, None] >> np.arange(n) & 1)  # the last stays, as |sum| counts
    else:
        chosen = [*itertools.combinations(range(2 * n), n)]
        patterns = np.full((len(chosen), 2 * n), -1)
        np.put_along_axis(patterns, np.asarray(chosen), 1, axis=1)
    values = np.random.default_rng(0).standard_normal((DATASETS, SIMULATED))[:, : patterns.shape[1]]
    values[:, :n] += effect
    sums = np.abs(values @ patterns.T)  # the first pattern is what was observed
    return float(np.mean(np.mean(sums >= sums[:, :1] * (1 - ROUNDING), axis=1) <= level))


def student_quantile(share: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution."""
    from scipy.special import stdtrit  # 0.1 s, which sweeps do without

    return float(stdtrit(freedom, share))


def _test(a: np.ndarray, b: np.ndarray, is_paired: bool) -> Decision:
    samples = [b - a] if is_paired else [a, b]
    freedom = sum(map(len, samples)) - len(samples)
    difference = b.mean() - a.mean()
    effect = math.nan
    if freedom > 0:
        spread = math.sqrt(sum(float(np.sum((one - one.mean()) ** 2)) for one in samples) / freedom)
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
    )


def _p_value(a: np.ndarray, b: np.ndarray, is_paired: bool) -> float:
    return flip_signs(b - a) if is_paired else permute(a, b)


def _blocks(rows: int, width: int) -> Iterator[int]:
    """Yield how many of the rows to draw at a time; results do not depend on it."""
    while rows:
        yield (block := min(rows, max(BLOCK // width, 1)))
        rows -= block


def _sizes(level: float, is_paired: bool) -> Iterator[int]:
    """Yield numbers of values that can decide at a level."""
    for n in range(2, MOST_NEEDED + 1):
        if smallest_p(n, None if is_paired else n) <= level:
            yield n
