"""Evidence about the differences of pairs that may be looked at after every pair, without a planned number of them.

A p-value for a planned number of pairs is wrong once someone looks after each pair and stops at the first p below 0.05.
An e-process is not. It is the wealth of a gambler who starts with 1 and bets on the sign of each difference. If the two
settings are equal, both signs are equally likely whatever came before, and even given the size of the difference, so no
bet is favorable: the expected wealth stays 1 at any time, and the wealth ever reaches 1 / level with a probability of
at most `level` (Ville 1939). With a bet b in (-1, 1), the wealth is multiplied by 1 + b or 1 - b.

The bet on a difference d is tanh(k d / s), with s the root mean square of the differences so far. For normal
differences with mean m and variance v, that is the best bet if k / s = m / v: given its size |d|, the odds of a
positive sign are exp(2 m |d| / v), so 1 + tanh(m d / v) is the likelihood ratio. The best k is unknown, so the wealth
is split evenly over several, half of it on either sign. Nothing is assumed about the distribution except its symmetry,
and every pair of values drawn alike has a symmetric difference.

Sources:
    Ville, Etude critique de la notion de collectif, 1939; Ramdas, Grunwald, Vovk and Shafer, Game-theoretic statistics
    and safe anytime-valid inference, 2023 (arXiv:2210.01948).
    De la Pena, A general class of exponential inequalities for martingales and ratios, 1999, for symmetric differences.
"""

from __future__ import annotations

import math

import numpy as np

BETS = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
"""Values of k. Six differences with equal signs decide at a level of 0.05, the fewest that can with both signs."""
WIDEST = 1e3  # bounds farther from the differences than this many times their range count as unbounded
CANDIDATES = 200  # centers that are tried on each side
HALVINGS = 40  # of the gap between a center that is refuted and one that is not


def log_wealth(differences: np.ndarray, sign: int = 0) -> np.ndarray:
    """Return the logarithm of the wealth after each difference.

    Args:
        differences: in the order in which they were observed, `(..., n)`.
        sign: 1 or -1 to bet only on positive or negative differences; 0 to bet half on either.

    Returns:
        The log-wealth, `(..., n)`. With `sign=1` it is evidence against a center of symmetry of 0 or below.
    """
    squares = np.cumsum(differences**2, axis=-1)
    scale = np.sqrt(squares / np.arange(1, differences.shape[-1] + 1))
    scaled = np.divide(differences, scale, out=np.zeros_like(differences), where=scale > 0)
    signs = np.array([sign] if sign else [1, -1])
    bets = np.multiply.outer(signs, BETS).reshape(-1, *[1] * differences.ndim) * scaled
    # 1 + tanh(x) is 2 / (1 + exp(-2 x)), which stays exact for large negative x.
    wealth = np.cumsum(math.log(2) - np.logaddexp(0, -2 * bets), axis=-1)
    return np.logaddexp.reduce(wealth, axis=0) - math.log(len(bets))


def anytime_p(differences: np.ndarray, sign: int = 0) -> float:
    """Return a p-value that is valid at every look: 1 divided by the largest wealth so far, at most 1."""
    return min(1.0, math.exp(-float(log_wealth(differences, sign).max(initial=0.0))))


def anytime_interval(differences: np.ndarray, level: float) -> tuple[float, float] | None:
    """Return bounds that contain the center of the differences at every look at once, with probability 1 - level.

    A center c is refuted once the wealth against differences minus c has reached 1 / level. The interval spans all
    centers that are not refuted.

    Returns:
        The bounds; None if there are too few differences to refute any center, however far away.
    """
    middle = float(np.median(differences))
    reach = float(np.abs(differences - middle).max()) or 1e-9 * (abs(middle) or 1.0)

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
