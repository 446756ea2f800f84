"""A power law of loss over compute, with its prediction and intervals. Pure functions of numbers, with fixed seeds.

The form L = a C^-b + c is that of Henighan et al., Scaling laws for autoregressive generative modeling, 2020
(arXiv:2010.14701). It is fitted to log L, because relative errors are about equal at all amounts of compute.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runner.comparing.decision import LEVEL, NORMAL, student_quantile

LEAST = 3
"""The smallest number of amounts of compute to which a law is fitted."""
RESAMPLES = 1_000
LEAST_FLOOR = 0.01  # fraction of the smallest loss that a floor must exceed in nearly all resamples to count
STARTS = (0.1, 0.5, 0.9)  # floors from which fits start, as fractions of the smallest loss
CONVERGED = (1, 2, 3, 4)  # statuses with which MINPACK reports convergence

Interval = tuple[float, float]


@dataclass(frozen=True)
class Law:
    """L = scale (C / unit)^-exponent + floor.

    Attributes:
        unit: the compute at which `scale` is the loss above the floor.
        scale: above 0, unit of the loss.
        exponent: how fast the loss falls, without a unit.
        floor: the loss that no amount of compute reaches; 0 if the values do not determine it.
    """

    unit: float
    scale: float
    exponent: float
    floor: float = 0.0

    def at(self, compute: float) -> float:
        """Return the loss at an amount of compute."""
        return self.scale * (compute / self.unit) ** -self.exponent + self.floor


@dataclass(frozen=True)
class Extrapolation:
    """A law, and its prediction beyond the fitted range.

    Attributes:
        law: the law.
        exponent: 95 % interval of its exponent; None if an amount of compute has a single value, so that the noise is
            unknown.
        floor: 95 % interval of its floor; None without a floor.
        predicted: the predicted loss.
        interval: 95 % prediction interval of the mean of the requested number of values.
    """

    law: Law
    exponent: Interval | None
    floor: Interval | None
    predicted: float
    interval: Interval | None


def fit(compute: Sequence[float], losses: Sequence[float], has_floor: bool, start: Law | None = None) -> Law:
    """Return the law with the least squared error in the log of losses `(n,)` at amounts of compute `(n,)`.

    Args:
        compute: amounts above 0, at least two different ones; three for a floor.
        losses: losses above 0.
        has_floor: whether the law may have a floor; it is 0 if none fits better.
        start: the law from which the fit starts; None: it starts from several floors.
    """
    unit = float(compute[0])
    x = np.log(np.asarray(compute) / unit)
    y = np.log(np.asarray(losses))
    slope, height = np.polyfit(x, y, 1)
    plain = Law(unit, math.exp(height), -float(slope))
    if not has_floor:
        return plain
    least = float(np.min(losses))
    floors = [part * least for part in STARTS]
    if start is not None:
        floors = [min(start.floor or LEAST_FLOOR * least, 0.99 * least)]
    laws = [plain]
    for floor in floors:
        slope, height = np.polyfit(x, np.log(np.asarray(losses) - floor), 1)
        refined = _refine(x, y, (float(height), -float(slope), math.log(floor)))
        laws += [Law(unit, *refined)] if refined is not None else []
    return min(laws, key=lambda law: sum((math.log(law.at(c)) - v) ** 2 for c, v in zip(compute, y, strict=True)))


def extrapolate(compute: Sequence[float], losses: Sequence[Sequence[float]], target: float, runs: int) -> Extrapolation:
    """Return the law of losses, and its prediction of the mean of several runs at another amount of compute.

    The intervals come from a bootstrap: the relative noise of all values is pooled and redrawn around the means. A
    floor is part of the law if there are more amounts of compute than the law has parameters, and if nearly all
    resamples have a floor. If the values can neither confirm nor exclude one, the intervals allow for both.

    Args:
        compute: amounts of compute, at least `LEAST` different ones.
        losses: for each amount of compute its values, all above 0.
        target: the amount of compute at which to predict.
        runs: the number of runs whose mean is predicted.
    """
    means = [float(np.mean(values)) for values in losses]
    noise = _noise(losses)
    if noise is None:
        law = fit(compute, means, has_floor=False)
        return Extrapolation(law, None, None, law.at(target), None)
    generator = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return generator.choice(noise, (RESAMPLES, count)).mean(axis=1)

    resampled = np.exp(np.log(means) + np.stack([draw(len(values)) for values in losses], axis=1))
    has_floor = len(means) > LEAST
    law = fit(compute, means, has_floor)
    laws = [fit(compute, row, has_floor, law) for row in resampled]
    floor = _interval([law.floor for law in laws])
    if floor[0] <= LEAST_FLOOR * min(means):
        law = fit(compute, means, has_floor=False)
        laws += [fit(compute, row, has_floor=False) for row in resampled]
    predictions = np.asarray([law.at(target) for law in laws])
    predictions *= np.exp(np.resize(draw(runs), len(laws)))
    return Extrapolation(
        law,
        exponent=_interval([law.exponent for law in laws]),
        floor=floor if law.floor else None,
        predicted=law.at(target),
        interval=_interval(predictions),
    )


def _refine(x: np.ndarray, y: np.ndarray, start: tuple[float, float, float]) -> tuple[float, float, float] | None:
    """Return the scale, exponent and floor that fit the log loss best; None if the fit does not converge."""
    from scipy.optimize import leastsq  # `curve_fit` would also take the time for a covariance

    def residuals(law: np.ndarray) -> np.ndarray:
        height, exponent, floor = law
        return np.logaddexp(height - exponent * x, floor) - y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the status tells whether the fit failed
        (height, exponent, floor), status = leastsq(residuals, start, maxfev=1000)
    try:
        return (math.exp(height), float(exponent), math.exp(floor)) if status in CONVERGED else None
    except OverflowError:
        return None


def _noise(losses: Sequence[Sequence[float]]) -> np.ndarray | None:
    """Return the relative deviations of all values from their means; None if an amount of compute has a single value.

    They are widened twice: by sqrt(n / (n - 1)), because deviations from the mean of n values are too small, and to the
    tails of Student's t, because few values estimate the noise with uncertainty.
    """
    if min(map(len, losses)) < 2:
        return None
    pooled = [
        (np.log(values) - np.mean(np.log(values))) * math.sqrt(len(values) / (len(values) - 1)) for values in losses
    ]
    freedom = sum(len(values) - 1 for values in losses)
    tails = student_quantile(1 - LEVEL / 2, freedom) / NORMAL.inv_cdf(1 - LEVEL / 2)
    return np.concatenate(pooled) * tails


def _interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the quantiles between which the middle 95 % of values lie."""
    low, high = np.quantile(values, (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)
