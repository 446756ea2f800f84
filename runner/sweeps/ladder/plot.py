"""The plot of a ladder: the loss of each size over compute, and the power law with its prediction."""

from __future__ import annotations

from typing import Any

from runner.pictures.figure import add_legend, make_figure, shorten, style
from runner.sweeps.ladder.rungs import Ladder, size_of
from runner.sweeps.plot import color_of

POINTS = 100  # of the law's line


def draw_ladder(ladder: Ladder) -> Any:
    """Return a figure of a ladder: a line for each size, the law, and its prediction for the held-out rung."""
    legend: dict[str, Any] = {}
    with style():
        figure = make_figure(7.0, 4.4)
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xlabel="training compute, floating-point operations")
        axes.set_ylabel(shorten(ladder.objective))
        for rank, size in enumerate(ladder.sizes):
            points = [
                (rung.flop, setting.mean, setting.spread or 0.0)
                for rung in ladder.rungs
                for setting in rung.settings
                if size_of(setting) == size
            ]
            flops, means, spreads = zip(*points, strict=True)
            legend[shorten(size)] = axes.errorbar(
                flops, means, spreads, fmt="o-", color=color_of(rank), markersize=4, capsize=3, linewidth=0.9
            )
        legend |= _draw_law(axes, ladder)
        axes.set_title("mean over seeds; bar: one standard deviation")
        _set_ticks(axes, [rung.flop for rung in ladder.rungs])
        add_legend(axes, [*legend.values()], [*legend])
    return figure


def _draw_law(axes: Any, ladder: Ladder) -> dict[str, Any]:
    """Draw the law up to the last rung, and the interval in which it predicts the loss there."""
    import numpy as np

    extrapolation = ladder.extrapolation
    if extrapolation is None:
        return {}
    last = ladder.rungs[-1].flop
    flops = np.geomspace(ladder.rungs[0].flop, last, POINTS)
    losses = [extrapolation.law.at(flop) for flop in flops]
    legend = {"law": axes.plot(flops, losses, color="black", linestyle="--", linewidth=1)[0]}
    predicted = extrapolation.predicted
    low, high = extrapolation.interval or (predicted, predicted)
    bars = [[predicted - low], [high - predicted]]
    style = {"fmt": "D", "color": "black", "markersize": 6, "capsize": 6, "fillstyle": "none", "zorder": 4}
    legend["predicted, 95 %"] = axes.errorbar([last], [predicted], np.maximum(bars, 0.0), **style)
    return legend


def _set_ticks(axes: Any, flops: list[float]) -> None:
    """Put a tick at each rung, and label losses with plain numbers."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_xticks(flops, [f"{flop:g}" for flop in flops])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
