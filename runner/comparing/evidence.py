"""Evidence about paired differences that may be checked after every pair, without a planned number of pairs.

A p-value for a planned number of pairs is wrong if someone checks it after each pair and stops at the first below 0.05.
An e-process is not. It is the wealth of a gambler who starts with 1 and bets on the sign of each difference. If the two
settings are equal, both signs are equally likely whatever came before, and even given the size of the difference, so no
bet is favorable: the expected wealth stays 1 at any time, and the wealth ever reaches 1 / level with a probability of
at most `level` (Ville 1939). With a bet b in (-1, 1), the wealth is multiplied by 1 + b or 1 - b.

The bet on a difference d is tanh(k d / s), with s the root mean square of the differences so far. For normal
differences with mean m and variance v, that is the best bet if k / s = m / v: given its size |d|, the odds of a
positive sign are exp(2 m |d| / v), so 1 + tanh(m d / v) is the likelihood ratio. The best k is unknown, so the wealth
is split evenly over several, half of it on either sign. Nothing is assumed about the distribution except its symmetry,
and the difference of two values from the same distribution is always symmetric.

Sources:
    Ville, Etude critique de la notion de collectif, 1939; Ramdas, Grunwald, Vovk and Shafer, Game-theoretic statistics
    and safe anytime-valid inference, 2023 (arXiv:2210.01948).
    De la Pena, A general class of exponential inequalities for martingales and ratios, 1999, for symmetric differences.
"""

from __future__ import annotations

import math

import numpy as np

BETS = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
"""Values of k. At a level of 0.05, six differences of the same sign decide, the fewest possible in a two-sided test."""
WIDEST = 1e3  # bounds farther from the differences than this many times their range count as unbounded
MOST_EXPECTED = 200  # further pairs; more are not predicted
CANDIDATES = 200  # centers that are tried on each side
HALVINGS = 40  # of the gap between a center that is refuted and one that is not


def log_wealth(differences: np.ndarray, sign: int = 0) -> np.ndarray:
    """Return the logarithm of the wealth after each difference.

    Args:
        differences: in the order in which they were observed, `(..., n)`. An infinite one, of a run that diverged,
            counts as one of the usual size.
        sign: 1 or -1 to bet only on positive or negative differences; 0 to bet half on either.

    Returns:
        The log-wealth, `(..., n)`. With `sign=1` it is evidence against a center of symmetry of 0 or below.
    """
    is_finite = np.isfinite(differences)
    squares = np.cumsum(np.where(is_finite, differences, 0.0) ** 2, axis=-1)
    scale = np.sqrt(squares / np.maximum(np.cumsum(is_finite, axis=-1), 1))
    signed = np.where(is_finite, 0.0, np.sign(differences))
    scaled = np.divide(differences, scale, out=signed, where=is_finite & (scale > 0))
    signs = np.array([sign] if sign else [1, -1])
    bets = np.multiply.outer(signs, BETS).reshape(-1, *[1] * differences.ndim) * scaled
    # 1 + tanh(x) is 2 / (1 + exp(-2 x)), which stays exact for large negative x.
    wealth = np.cumsum(math.log(2) - np.logaddexp(0, -2 * bets), axis=-1)
    return np.logaddexp.reduce(wealth, axis=0) - math.log(len(bets))


def anytime_p(differences: np.ndarray, sign: int = 0) -> float:
    """Return a p-value that is valid at every look: 1 divided by the largest wealth so far, at most 1."""
    return min(1.0, math.exp(-float(log_wealth(differences, sign).max(initial=0.0))))


def equivalence_p(differences: np.ndarray, margin: float) -> float:
    """Return the p-value, valid at every look, of the hypothesis that the center is `margin` or farther from 0.

    Both sides must be refuted: a center of `margin` or above, and one of `-margin` or below.
    """
    return max(anytime_p(margin - differences, 1), anytime_p(margin + differences, 1))


def expected_more(differences: np.ndarray, level: float, sign: int = 0) -> int | None:
    """Return how many further differences raise the wealth to 1 / level if they repeat those so far.

    Returns:
        The number; None if it is above `MOST_EXPECTED`, or if there are no differences.
    """
    repeated = np.resize(differences, len(differences) + MOST_EXPECTED) if len(differences) else differences
    reached = np.flatnonzero(log_wealth(repeated, sign) >= -math.log(level))
    return max(0, int(reached[0]) + 1 - len(differences)) if len(reached) else None


def anytime_interval(differences: np.ndarray, level: float) -> tuple[float, float] | None:
    """Return bounds that contain the center of the differences at every look at once, with probability 1 - level.

    A center c is refuted once the wealth against differences minus c has reached 1 / level. The interval spans all
    centers that are not refuted.

    Returns:
        The bounds; None if there are too few differences to refute any center, however far away.
    """
    finite = differences[np.isfinite(differences)]
    if not len(finite):
        return None
    middle = float(np.median(finite))
    reach = float(np.abs(finite - middle).max()) or 1e-9 * (abs(middle) or 1.0)

    def is_open(centers: np.ndarray) -> np.ndarray:
        return log_wealth(differences - centers[:, None]).max(axis=1) < -math.log(level)

    bounds = []
    for side in (-1.0, 1.0):
        steps = middle + side * reach * np.concatenate([[0.0], np.geomspace(1e-3, WIDEST, CANDIDATES)])
        unrefuted = np.flatnonzero(is_open(steps))
        last = int(unrefuted[-1]) if len(unrefuted) else 0
        if last == CANDIDATES:
            return None
        inside, outside = float(steps[last]), float(steps[last + 1])
        for _ in range(HALVINGS):
            center = (inside + outside) / 2
            inside, outside = (center, outside) if is_open(np.array([center]))[0] else (inside, center)
        bounds.append(outside)
    return bounds[0], bounds[1]
