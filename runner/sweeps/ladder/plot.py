"""The plot of a ladder: the loss of each size over compute, and the power law with its prediction."""

from __future__ import annotations

from typing import Any

from runner.pictures.figure import add_legend, make_figure, shorten, style
from runner.sweeps.ladder.rungs import Ladder, size_of
from runner.sweeps.plot import color_of

POINTS = 100  # of the law's line


def draw_ladder(ladder: Ladder) -> Any:
    """Return a figure of a ladder: a line for each size, the law, and the prediction for the rung that is held out."""
    legend: dict[str, Any] = {}
    with style():
        figure = make_figure(7.0, 4.4)
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xlabel="training compute, floating-point operations")
        axes.set_ylabel(shorten(ladder.objective))
        for place, size in enumerate(ladder.sizes):
            found = [(rung.flop, one) for rung in ladder.rungs for one in rung.settings if size_of(one) == size]
            flops, settings = zip(*found, strict=True)
            means = [one.mean for one in settings]
            spreads = [one.spread or 0.0 for one in settings]
            legend[shorten(size)] = axes.errorbar(
                flops, means, spreads, fmt="o-", color=color_of(place), markersize=4, capsize=3, linewidth=0.9
            )
        legend |= _draw_law(axes, ladder)
        axes.set_title("mean over seeds; bar: one standard deviation")
        _set_ticks(axes, [rung.flop for rung in ladder.rungs])
        add_legend(axes, [*legend.values()], [*legend])
    return figure


def _draw_law(axes: Any, ladder: Ladder) -> dict[str, Any]:
    """Draw the law up to the last rung, and the interval in which it predicts the loss there."""
    import numpy as np

    found = ladder.found
    if found is None:
        return {}
    last = ladder.rungs[-1].flop
    line = np.geomspace(ladder.rungs[0].flop, last, POINTS)
    drawn = {"law": axes.plot(line, [found.law.at(one) for one in line], color="black", linestyle="--", linewidth=1)[0]}
    low, high = found.interval or (found.predicted, found.predicted)
    bars = [[found.predicted - low], [high - found.predicted]]
    style = {"fmt": "D", "color": "black", "markersize": 6, "capsize": 6, "fillstyle": "none", "zorder": 4}
    drawn["predicted, 95 %"] = axes.errorbar([last], [found.predicted], np.maximum(bars, 0.0), **style)
    return drawn


def _set_ticks(axes: Any, flops: list[float]) -> None:
    """Put a tick at each rung, and plain numbers at the losses."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_xticks(flops, [f"{one:g}" for one in flops])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
