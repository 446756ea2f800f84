"""The picture of a sweep: positions, colors and labels, read from the figure."""

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
    """Draw and render the figure of a sweep, and return its axes."""
    figure = draw(group_jobs(rank_jobs(results, sweep())), "eval/acc", curves or {})
    assert render(figure, "svg").startswith(b"<?xml")
    return figure.get_axes()


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def curve(*values: float, interval: int = 10) -> LoggedCurve:
    """Return a curve with a value every `interval` batches."""
    logged = LoggedCurve()
    for number, value in enumerate(values, start=1):
        logged.add(number * interval, value)
    return logged


def points(line: Any) -> list[tuple[float, float]]:
    return [*zip(*line.get_data(), strict=True)]


def test_the_effect_of_a_key_shows_runs_means_and_the_best_setting():
    (axes,) = picture(GRID)
    lines = (line for line in axes.get_lines() if len(line.get_xdata()) and line.get_marker() in ("o", "s"))
    runs, means, ring = lines
    finite = {(0.01, 0.5), (0.01, 0.7), (0.1, 0.9), (1.0, 0.8), (10.0, 0.4)}
    assert {*points(runs)} == finite
    assert points(means) == [(0.01, pytest.approx(0.6)), (0.1, 0.9), (1.0, 0.8), (10.0, 0.4)]
    assert {*points(ring)} == {(0.01, 0.5), (0.01, 0.7)}  # of the best setting, not of the best run
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "optimizer.lr" and axes.get_ylabel() == "eval/acc"
    assert legend(axes) == ["circle: one run", "square: mean; bar: 1 standard deviation", "ring: best setting"]
    (bars,) = (container for container in axes.containers if container.has_yerr)
    (low, high), *_ = (path.vertices[:, 1] for path in bars.lines[2][0].get_paths())
    assert (low, high) == (pytest.approx(0.6 - 0.02**0.5), pytest.approx(0.6 + 0.02**0.5))


def test_zero_is_the_lowest_tick_of_a_logarithmic_axis():
    decays = [0, 0.0001, 0.001, 0.01]
    results = [result(0.5, f"decay={decay}", f"lr={lr}") for decay in decays for lr in (1, 2)]
    parallel, axes, _ = picture(results)
    assert axes.get_xscale() == "log"
    assert [*axes.get_xticks()] == pytest.approx([0.00001, 0.0001, 0.001, 0.01])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0.0001", "0.001", "0.01"]
    heights = {line.get_ydata()[0] for line in parallel.get_lines()[:8]}
    assert sorted(heights) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_curve_is_the_mean_over_seeds_with_a_band_of_one_standard_deviation():
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


def test_curves_with_different_batches_are_interpolated_for_their_mean():
    results = [result(0.5, f"seed={seed}") for seed in (0, 1)]
    axes, _ = picture(results, {"0": curve(0.0, 1.0, interval=10), "1": curve(0.0, 1.0, 2.0, interval=8)})
    (line,) = axes.get_lines()
    assert points(line) == [(10, pytest.approx(0.125)), (16, pytest.approx(0.8)), (20, pytest.approx(1.25))]


def test_of_a_hundred_settings_the_best_are_named_and_the_others_are_gray():
    results = [
        result(number / 100, f"lr={10.0 ** (-number / 25)}", f"model.width={number % 7}") for number in range(100)
    ]
    curves = {result.name: curve(0.0, result.objective or 0.0) for result in results}
    curves_axes, parallel, *effects = picture(results, curves)
    assert legend(curves_axes)[-1] == "92 more" and len(legend(curves_axes)) == len(COLORS) + 1
    colors = [line.get_color() for line in curves_axes.get_lines() if len(line.get_xdata())]
    assert colors.count(GRAY) == 92
    lines = [line for line in parallel.get_lines() if len(line.get_xdata()) == 3]
    assert len(lines) == 100
    assert [label.get_text() for label in parallel.get_xticklabels()] == ["lr", "width", "eval/acc"]
    best, lr = lines[-1], 10.0 ** (-99 / 25)
    assert best.get_color() == COLORS[0] and points(best) == [(0, 0.0), (1, pytest.approx(1 / 6)), (2, 1.0)]
    middle = lines[50].get_ydata()
    assert middle[0] == pytest.approx(1 - middle[2], abs=0.02)  # the axis of lr is logarithmic
    assert f"{lr:.0e}" == "1e-04" and {axes.get_xlabel() for axes in effects} == {"lr", "model.width"}


def test_a_setting_without_a_curve_is_not_in_the_legend():
    axes, _ = picture([result(value, f"lr={value}") for value in (0.1, 0.2, 0.3)], {"0.1": curve(1), "0.2": curve(1)})
    assert legend(axes) == ["lr=0.2", "lr=0.1"]


def test_text_values_are_ticks_and_their_runs_do_not_overlap():
    results = [result(0.1 * seed, f"model.name={name}", f"seed={seed}") for name in "xyz" for seed in range(3)]
    (axes,) = picture(results)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y", "z"]
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
        [result(10.0**number, f"lr={number}", lower=True) for number in range(-3, 3)],
        [result(value, f"a={value}", f"b={2 * value}", "c=null", f"d={value > 0.2}") for value in (0.1, 0.2, 0.3)],
        [result(0.5, f"lr={lr}", f"b={lr}") for lr in ("inf", "nan", "0.1", "1" + 400 * "0", "null", "true")],
        [result(0.5, f"note='{text}'") for text in ("$\\frac{", "<b>", "_x", "a" * 200, "日本", "%s{}")],
    ],
    ids=["one", "nothing swept", "nan", "decades", "many keys", "strange", "hostile"],
)
def test_every_kind_of_sweep_has_a_picture(results: list[Result]):
    axes = picture(results, {result.name: curve(0.5, 0.6) for result in results})[-1]
    objectives = [result.objective or 0.0 for result in results]
    assert axes.get_yscale() == ("log" if max(objectives) / min(objectives) >= 100 else "linear")
