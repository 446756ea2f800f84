"""Power laws: known laws are recovered, and intervals contain the next loss as often as they promise."""

from __future__ import annotations

import numpy as np
import pytest

from runner.sweeps.ladder.power_law import Extrapolation, extrapolate, fit

COMPUTE = [1e9 * 2**rung for rung in range(6)]


def true_loss(compute: float, floor: float) -> float:
    """Return the loss of the true law at some compute."""
    return 2.0 * (compute / 1e9) ** -0.3 + floor


def noisy_losses(
    generator: np.random.Generator, compute: list[float], floor: float, seeds: int = 3
) -> list[list[float]]:
    """Return the losses of each seed at each compute, with 1 % noise."""
    return [[true_loss(c, floor) * np.exp(0.01 * generator.standard_normal()) for _ in range(seeds)] for c in compute]


@pytest.mark.parametrize("floor", [0.0, 0.5, 3.0])
def test_a_law_without_noise_is_recovered(floor: float):
    law = fit(COMPUTE, [true_loss(compute, floor) for compute in COMPUTE], has_floor=True)
    assert (law.unit, law.scale, law.exponent) == (1e9, pytest.approx(2.0, 1e-3), pytest.approx(0.3, 1e-3))
    assert law.floor == pytest.approx(floor, abs=2e-3)
    assert law.at(1e12) == pytest.approx(true_loss(1e12, floor), 1e-2)


def test_a_law_without_a_floor_is_a_straight_line_on_log_log_axes():
    slope, intercept = np.polyfit(np.log(COMPUTE), np.log(losses := [3.0, 2.5, 2.4, 1.9, 1.8, 1.5]), 1)
    law = fit(COMPUTE, losses, has_floor=False)
    assert law.exponent == pytest.approx(-slope) and law.at(1.0) == pytest.approx(np.exp(intercept))


def test_a_floor_is_fitted_only_if_the_losses_show_it():
    generator = np.random.default_rng(0)
    with_floor = extrapolate(COMPUTE, noisy_losses(generator, COMPUTE, 1.0), 1e11, 3)
    assert with_floor.floor is not None and with_floor.floor[0] <= 1.0 <= with_floor.floor[1]
    assert with_floor.law.floor == pytest.approx(1, 0.2)
    without_floor = extrapolate(COMPUTE, noisy_losses(generator, COMPUTE, 0.0), 1e11, 3)
    assert without_floor.floor is None and without_floor.law.floor == 0.0
    three_rungs = extrapolate(COMPUTE[:3], noisy_losses(generator, COMPUTE[:3], 1.0), 1e11, 3)
    assert three_rungs.floor is None  # a law with a floor has three parameters, and would fit exactly


def test_a_rung_with_one_seed_gives_no_interval():
    losses = noisy_losses(np.random.default_rng(0), COMPUTE, 0.0)
    extrapolation = extrapolate(COMPUTE, [losses[0][:1], *losses[1:]], 1e11, 1)
    assert (extrapolation.exponent, extrapolation.floor, extrapolation.interval) == (None, None, None)
    assert extrapolation.predicted == pytest.approx(true_loss(1e11, 0.0), 0.05)


def test_extrapolation_is_deterministic():
    losses = noisy_losses(np.random.default_rng(0), COMPUTE[:3], 0.0)
    first: Extrapolation = extrapolate(COMPUTE[:3], losses, 1e11, 3)
    assert first == extrapolate(COMPUTE[:3], losses, 1e11, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("floor", "rungs"), [(0.0, 5), (1.0, 4)])
def test_most_intervals_contain_the_next_mean(floor: float, rungs: int):
    """The intervals promise 95 %. Few seeds give 92 %, and then at least 25 of 30 are inside with a chance of 97 %."""
    generator = np.random.default_rng(rungs)
    compute = COMPUTE[:rungs]
    inside = 0
    for _ in range(30):
        interval = extrapolate(compute, noisy_losses(generator, compute, floor), 2 * compute[-1], 3).interval
        (measured,) = noisy_losses(generator, [2 * compute[-1]], floor)
        assert interval is not None
        inside += interval[0] <= np.mean(measured) <= interval[1]
    assert inside >= 25, inside
