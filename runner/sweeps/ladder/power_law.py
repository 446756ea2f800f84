"""A power law of loss over compute, its interval, and its predictions. Pure functions of numbers, with fixed seeds.

The form L = a C^-b + c is that of Henighan et al., Scaling laws for autoregressive generative modeling, 2020
(arXiv:2010.14701), fitted to log L, as relative errors are alike at all amounts of compute.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runner.comparing.decision import LEVEL, NORMAL, student_quantile

LEAST = 3
"""Amounts of compute below which no law is fitted."""
RESAMPLES = 1_000
TOLD = 0.01  # share of the smallest loss that a floor must exceed in nearly all resamples to be part of the law
STARTS = (0.1, 0.5, 0.9)  # floors to begin the fit with, as shares of the smallest loss
FOUND = (1, 2, 3, 4)  # statuses of MINPACK with which it has found the least squares

Interval = tuple[float, float]


@dataclass(frozen=True)
class Law:
    """L = scale (C / unit)^-exponent + floor.

    Attributes:
        unit: the compute at which `scale` is the loss above the floor.
        scale: above 0, unit of the loss.
        exponent: how fast the loss falls; no unit.
        floor: the loss that no amount of compute can go below; 0 if the values do not determine it.
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
    """A law, and its prediction outside the fitted range.

    Attributes:
        law: the law.
        exponent: 95 % interval of its exponent; None if some compute has one value only, so that its noise is unknown.
        floor: 95 % interval of its floor; None without a floor.
        predicted: the loss that it predicts.
        interval: 95 % prediction interval of the mean of the requested number of values.
    """

    law: Law
    exponent: Interval | None
    floor: Interval | None
    predicted: float
    interval: Interval | None


def fit(compute: Sequence[float], losses: Sequence[float], has_floor: bool, start: Law | None = None) -> Law:
    """Return the law that fits losses `(n,)` best at amounts of compute `(n,)`.

    Args:
        compute: above 0, at least two different ones; three for a floor.
        losses: losses above 0.
        has_floor: whether the law has a floor; it is 0 where the fit finds none.
        start: a law to begin with; several are tried without one.
    """
    unit = float(compute[0])
    x = np.log(np.asarray(compute) / unit)
    y = np.log(np.asarray(losses))
    slope, height = np.polyfit(x, y, 1)
    plain = Law(unit, math.exp(height), -float(slope))
    if not has_floor:
        return plain
    least = float(np.min(losses))
    floors = [share * least for share in STARTS] if start is None else [min(start.floor or TOLD * least, 0.99 * least)]
    found = [plain]
    for floor in floors:
        slope, height = np.polyfit(x, np.log(np.asarray(losses) - floor), 1)
        law = _refine(x, y, (float(height), -float(slope), math.log(floor)))
        found += [Law(unit, *law)] if law is not None else []
    return min(found, key=lambda one: sum((math.log(one.at(c)) - v) ** 2 for c, v in zip(compute, y, strict=True)))


def extrapolate(compute: Sequence[float], losses: Sequence[Sequence[float]], target: float, runs: int) -> Extrapolation:
    """Return the law of losses, and its prediction of the mean of several runs at another amount of compute.

    Values are resampled around the mean at their compute: the relative noise of all is pooled. A floor is part of the
    law if there are more amounts of compute than the law has parameters and nearly all resamples have one. If it can be
    neither confirmed nor excluded, the intervals allow for it. There are at least `LEAST` different amounts of compute,
    and all losses are above 0. The mean of `runs` values is predicted.
    """
    means = [float(np.mean(one)) for one in losses]
    noise = _noise(losses)
    if noise is None:
        law = fit(compute, means, has_floor=False)
        return Extrapolation(law, None, None, law.at(target), None)
    generator = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return generator.choice(noise, (RESAMPLES, count)).mean(axis=1)

    resampled = np.exp(np.log(means) + np.stack([draw(len(one)) for one in losses], axis=1))
    has_floor = len(means) > LEAST
    law = fit(compute, means, has_floor)
    laws = [fit(compute, row, has_floor, law) for row in resampled]
    floor = _middle([one.floor for one in laws])
    if floor[0] <= TOLD * min(means):
        law = fit(compute, means, has_floor=False)
        laws += [fit(compute, row, has_floor=False) for row in resampled]
    predictions = np.asarray([one.at(target) for one in laws]) * np.exp(np.resize(draw(runs), len(laws)))
    return Extrapolation(
        law,
        exponent=_middle([one.exponent for one in laws]),
        floor=floor if law.floor else None,
        predicted=law.at(target),
        interval=_middle(predictions),
    )


def _refine(x: np.ndarray, y: np.ndarray, start: tuple[float, float, float]) -> tuple[float, float, float] | None:
    """Return scale, exponent and floor of the least squares in log loss; None if none are found."""
    from scipy.optimize import leastsq  # as `curve_fit`, but without the time for its covariance

    def residuals(law: np.ndarray) -> np.ndarray:
        height, exponent, floor = law
        return np.logaddexp(height - exponent * x, floor) - y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a failure, which the status shows
        (height, exponent, floor), status = leastsq(residuals, start, maxfev=1000)
    try:
        return (math.exp(height), float(exponent), math.exp(floor)) if status in FOUND else None
    except OverflowError:
        return None


def _noise(losses: Sequence[Sequence[float]]) -> np.ndarray | None:
    """Return the relative deviations of all values, as wide as so few estimate them; None if any stands alone."""
    if min(map(len, losses)) < 2:
        return None
    pooled = [(np.log(one) - np.mean(np.log(one))) * math.sqrt(len(one) / (len(one) - 1)) for one in losses]
    freedom = sum(len(one) - 1 for one in losses)
    wider = student_quantile(1 - LEVEL / 2, freedom) / NORMAL.inv_cdf(1 - LEVEL / 2)
    return np.concatenate(pooled) * wider


def _middle(values: Sequence[float] | np.ndarray) -> Interval:
    low, high = np.quantile(values, (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)
