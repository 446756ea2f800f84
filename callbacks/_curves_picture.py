"""Draws the curves of a run: one panel for losses, one for each metric, and one for learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from runner.pictures.curves import LoggedCurve
from runner.pictures.figure import COLORS, add_legend, make_figure, scale, shorten, style

MAX_CURVES = 8  # in a panel; a longer legend would cover the curves
MAX_PANELS = 6
MAX_MARKERS = 40  # on a curve
SMOOTHED = 60  # a training loss curve with more points than this is smoothed
RATE = "learning rate"


def panels(curves: Mapping[str, LoggedCurve]) -> dict[str, list[str]]:
    """Return the keys of each panel by its title: losses first, metrics by name, learning rates last."""
    all_panels: dict[str, list[str]] = {}
    for key in sorted(curves, key=lambda key: (_kind(key), key.count("/"))):  # per-class metrics last
        kind, _, name = key.partition("/")
        title = "loss" if kind == "loss" else name.split("/")[1] if kind == "metrics" else RATE
        all_panels.setdefault(title, []).append(key)
    rates = {title: keys for title, keys in all_panels.items() if title == RATE}
    results = [(title, keys) for title, keys in all_panels.items() if title != RATE]
    return {title: keys[:MAX_CURVES] for title, keys in (*results[: MAX_PANELS - len(rates)], *rates.items())}


def draw(curves: Mapping[str, LoggedCurve], title: str, batches_per_epoch: int | None, left_out: int = 0) -> Any:
    """Return a matplotlib figure of the curves of a run.

    If the number of batches per epoch is known, a second axis counts epochs. The title says how many curves are not
    drawn, including `left_out` curves that are not in `curves`.
    """
    shown = panels(curves)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    with style():
        figure = make_figure(max(5.0, 4.2 * columns), 3.1 * rows + 0.3)
        left_out += len(curves) - sum(map(len, shown.values()))
        figure.suptitle(shorten(title, 80) + (f"  ({left_out:,} curves are not drawn)" if left_out else ""))
        end = max(curve.steps[-1] for curve in curves.values())
        for position, (name, keys) in enumerate(shown.items(), start=1):
            axes = figure.add_subplot(rows, columns, position)
            handles = [_plot(axes, key, curves[key], color) for key, color in zip(keys, COLORS, strict=False)]
            finite = [value for key in keys for value in curves[key].values if math.isfinite(value)]
            if name != RATE:  # it often ends near 0, and a logarithmic axis would show little else
                scale(axes, "y", finite)
            axes.set_ylabel(shorten(name) + (", per batch" if name == RATE else ""))
            axes.set_xlim(-0.03 * end, 1.03 * end)
            _label_x_axis(axes, batches_per_epoch)
            labels = [_label(key, curves[key]) for key in keys]
            add_legend(axes, handles, labels)
    return figure


def _kind(key: str) -> int:
    """Return 0 for the key of a loss, 1 for a metric, and 2 for a learning rate."""
    return ("loss", "metrics").index(key.split("/")[0]) if key.startswith(("loss/", "metrics/")) else 2


def _label(key: str, curve: LoggedCurve) -> str:
    """Return the legend label of a curve: its name, its smoothing, and the first batch at which it was not finite."""
    kind, _, name = key.partition("/")
    if kind == "metrics":
        label, _, metric = name.partition("/")
        name = "/".join([label, *metric.split("/")[1:]])
    elif kind == "loss":
        name = name.removesuffix("/total")
    else:
        name = key.removeprefix("lr-").removesuffix("/group0")
    texts = [shorten(name)]
    if width := _window(key, curve):
        texts.append(f"smoothed over {width * curve.stride:,} batches")
    gaps = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
    if gaps:
        texts.append(f"not finite at batch {gaps[0]:,.0f}" + (" and later" if len(gaps) > 1 else ""))
    return ",\n".join(texts)


def _plot(axes: Any, key: str, curve: LoggedCurve, color: str) -> Any:
    """Draw a curve and return its line. A long curve of the training loss is drawn faint, under its smoothed line."""
    width = _window(key, curve)
    if width:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.25, linewidth=0.7)
        (line,) = axes.plot(curve.steps, smooth(curve.values, width), color=color, linewidth=1.4)
        return line
    every = max(1, math.ceil(len(curve.values) / MAX_MARKERS))
    marker = "" if key.startswith(("loss/train", "lr-")) and len(curve.values) > 2 else "o"
    (line,) = axes.plot(
        curve.steps, curve.values, color=color, marker=marker, markevery=every, markersize=3.5, linewidth=1.2
    )
    return line


def _window(key: str, curve: LoggedCurve) -> int:
    """Return the odd number of points over which a curve is smoothed, or 0 for no smoothing."""
    points = len(curve.values)
    return 2 * (points // 60) + 1 if key.startswith("loss/train") and points > SMOOTHED else 0


def _label_x_axis(axes: Any, batches_per_epoch: int | None) -> None:
    """Label the axis of batches, and add an axis of epochs at the top."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel("batch")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if batches_per_epoch:
        functions = (lambda batch: batch / batches_per_epoch, lambda epoch: epoch * batches_per_epoch)
        epoch_axis = axes.secondary_xaxis("top", functions=functions)
        epoch_axis.set_xlabel("epoch")
        epoch_axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Smooth values: fit a straight line to the `width` values around each value, and return its height there.

    Away from the ends and from gaps, that is the mean. Unlike a running mean, the result does not lag behind, and
    follows the curve to both ends. Values that are not finite are skipped and remain gaps. The values are evenly
    spaced; `width` is odd.
    """
    smoothed = []
    for center, value in enumerate(values):
        first = max(0, center - width // 2)
        end = center + width // 2 + 1
        window = [(index, y) for index, y in enumerate(values[first:end], first) if math.isfinite(y)]
        if not math.isfinite(value) or len(window) < 2:
            smoothed.append(value)
        elif len(window) == width:
            smoothed.append(statistics.fmean(values[first:end]))
        else:
            line = statistics.linear_regression(*zip(*window, strict=True))
            smoothed.append(line.intercept + line.slope * center)
    return smoothed
