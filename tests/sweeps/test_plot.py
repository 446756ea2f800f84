"""The picture of a sweep: what lies where in it, read from the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sweep_results import GRID, result, sweep

from runner.pictures.curves import LoggedCurve
from runner.pictures.figure import COLORS, GRAY, render
from runner.records.result import Result
from runner.sweeps.plot import draw
from runner.sweeps.settings import group_jobs, rank_jobs


def picture(results: Sequence[Result], curves: dict[str, LoggedCurve] | None = None) -> list[Any]:
    """The axes of the figure, which is rendered too."""
    figure = draw(group_jobs(rank_jobs(results, sweep())), "eval/acc", curves or {})
    assert render(figure, "svg").startswith(b"<?xml")
    return figure.get_axes()


def legend(axes: Any) -> list[str]:
    return [one.get_text() for one in axes.get_legend().get_texts()]


def curve(*values: float, every: int = 10) -> LoggedCurve:
    made = LoggedCurve()
    for place, value in enumerate(values, start=1):
        made.add(place * every, value)
    return made


def points(line: Any) -> list[tuple[float, float]]:
    return [*zip(*line.get_data(), strict=True)]


def test_the_effect_of_a_parameter_has_runs_means_and_the_best_setting():
    (axes,) = picture(GRID)
    runs, means, ring = (one for one in axes.get_lines() if len(one.get_xdata()) and one.get_marker() in ("o", "s"))
    finite = {(0.01, 0.5), (0.01, 0.7), (0.1, 0.9), (1.0, 0.8), (10.0, 0.4)}
    assert {*points(runs)} == finite
    assert points(means) == [(0.01, pytest.approx(0.6)), (0.1, 0.9), (1.0, 0.8), (10.0, 0.4)]
    assert {*points(ring)} == {(0.01, 0.5), (0.01, 0.7)}  # not the luckiest run
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "optimizer.lr" and axes.get_ylabel() == "eval/acc"
    assert legend(axes) == ["circle: one run", "square: mean; bar: 1 standard deviation", "ring: best setting"]
    (bars,) = (one for one in axes.containers if one.has_yerr)
    (low, high), *_ = (path.vertices[:, 1] for path in bars.lines[2][0].get_paths())
    assert (low, high) == (pytest.approx(0.6 - 0.02**0.5), pytest.approx(0.6 + 0.02**0.5))


def test_zero_stands_below_values_that_are_logarithmic():
    decays = [0, 0.0001, 0.001, 0.01]
    results = [result(0.5, f"decay={one}", f"lr={lr}") for one in decays for lr in (1, 2)]
    parallel, decay, _ = picture(results)
    assert decay.get_xscale() == "log"
    assert [*decay.get_xticks()] == pytest.approx([0.00001, 0.0001, 0.001, 0.01])
    assert [one.get_text() for one in decay.get_xticklabels()] == ["0", "0.0001", "0.001", "0.01"]
    heights = {height for line in parallel.get_lines()[:8] for height in [line.get_ydata()[0]]}
    assert sorted(heights) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_curve_is_the_mean_over_seeds_in_a_band_of_one_standard_deviation():
    results = [result(value, f"lr={lr}", f"seed={seed}") for lr, seed, value in ((1, 0, 0.4), (1, 1, 0.6), (2, 0, 0.9))]
    curves = {"1-0": curve(0.1, 0.2, 0.4), "1-1": curve(0.3, 0.4, 0.6), "2-0": curve(0.9, 0.9, 0.9)}
    axes, _ = picture(results, curves)
    worse, best = axes.get_lines()
    assert points(best) == [(10, 0.9), (20, 0.9), (30, 0.9)]
    assert points(worse) == [(10, pytest.approx(0.2)), (20, pytest.approx(0.3)), (30, pytest.approx(0.5))]
    assert (best.get_color(), worse.get_color()) == COLORS[:2]
    (band,) = axes.collections
    at_ten = {round(y, 6) for x, y in band.get_paths()[0].vertices if x == 10}
    assert at_ten == {round(0.2 - 0.02**0.5, 6), round(0.2 + 0.02**0.5, 6)}
    assert legend(axes) == ["lr=2", "lr=1"] and "band of one standard deviation" in axes.get_title()


def test_seeds_that_were_evaluated_at_other_batches_are_averaged_where_both_are():
    results = [result(0.5, f"seed={seed}") for seed in (0, 1)]
    axes, _ = picture(results, {"0": curve(0.0, 1.0, every=10), "1": curve(0.0, 1.0, 2.0, every=8)})
    (line,) = axes.get_lines()
    assert points(line) == [(10, pytest.approx(0.125)), (16, pytest.approx(0.8)), (20, pytest.approx(1.25))]


def test_a_hundred_settings_show_the_best_by_name_and_the_others_in_grey():
    results = [result(place / 100, f"lr={10.0 ** (-place / 25)}", f"model.width={place % 7}") for place in range(100)]
    curves = {one.name: curve(0.0, one.objective or 0.0) for one in results}
    curves_axes, parallel, *effects = picture(results, curves)
    assert legend(curves_axes)[-1] == "92 more" and len(legend(curves_axes)) == len(COLORS) + 1
    colors = [one.get_color() for one in curves_axes.get_lines() if len(one.get_xdata())]
    assert colors.count(GRAY) == 92
    lines = [one for one in parallel.get_lines() if len(one.get_xdata()) == 3]
    assert len(lines) == 100
    assert [one.get_text() for one in parallel.get_xticklabels()] == ["lr", "width", "eval/acc"]
    best, lr = lines[-1], 10.0 ** (-99 / 25)
    assert best.get_color() == COLORS[0] and points(best) == [(0, 0.0), (1, pytest.approx(1 / 6)), (2, 1.0)]
    middle = lines[50].get_ydata()
    assert middle[0] == pytest.approx(1 - middle[2], abs=0.02)  # the rates lie evenly, on a logarithmic axis
    assert f"{lr:.0e}" == "1e-04" and {one.get_xlabel() for one in effects} == {"lr", "model.width"}


def test_a_setting_whose_curve_is_not_known_has_no_name_in_the_legend():
    axes, _ = picture([result(value, f"lr={value}") for value in (0.1, 0.2, 0.3)], {"0.1": curve(1), "0.2": curve(1)})
    assert legend(axes) == ["lr=0.2", "lr=0.1"]


def test_texts_stand_side_by_side_and_their_runs_beside_one_another():
    results = [result(0.1 * seed, f"model.name={name}", f"seed={seed}") for name in "xyz" for seed in range(3)]
    (axes,) = picture(results)
    assert [one.get_text() for one in axes.get_xticklabels()] == ["x", "y", "z"]
    runs = axes.get_lines()[0].get_xdata()
    assert len({*runs}) == 9 and np.abs(np.asarray(runs) - np.round(runs)).max() <= 0.1


def test_a_sweep_of_seeds_shows_their_mean_and_spread():
    (axes,) = picture([result(value, f"seed={seed}") for seed, value in enumerate((0.4, 0.5, 0.6))])
    assert axes.get_title() == "mean 0.5, standard deviation 0.1, n = 3" and axes.get_xlabel() == "seed"
    assert legend(axes) == ["circle: one run", "line: mean", "band: 1 standard deviation"]


@pytest.mark.parametrize(
    "results",
    [
        [result(0.5, "seed=0")],
        [result(0.5)],
        [result(value, f"lr={lr}") for lr, value in ((0.1, 0.5), (0.2, math.nan), (0.4, 0.7))],
        [result(10.0**place, f"lr={place}", lower=True) for place in range(-3, 3)],
        [result(value, f"a={value}", f"b={2 * value}", "c=null", f"d={value > 0.2}") for value in (0.1, 0.2, 0.3)],
        [result(0.5, f"lr={lr}", f"b={lr}") for lr in ("inf", "nan", "0.1", "1" + 400 * "0", "null", "true")],
        [result(0.5, f"note='{text}'") for text in ("$\\frac{", "<b>", "_x", "a" * 200, "日本", "%s{}")],
    ],
    ids=["one", "nothing swept", "nan", "decades", "many keys", "strange", "hostile"],
)
def test_every_kind_of_sweep_has_a_picture(results: list[Result]):
    axes = picture(results, {one.name: curve(0.5, 0.6) for one in results})[-1]
    objectives = [one.objective or 0.0 for one in results]
    assert axes.get_yscale() == ("log" if max(objectives) / min(objectives) >= 100 else "linear")
