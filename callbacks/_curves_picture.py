"""The picture of a run: a panel each for its losses, for each of its metrics, and for its learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from runner.pictures.curves import Curve
from runner.pictures.figure import COLORS, add_legend, make_figure, scale, shorten, style

MAX_CURVES = 8  # in a panel; a longer legend would cover the curves
MAX_PANELS = 6
MARKED = 40  # at most this many points of a curve are marked
SMOOTHED = 60  # a curve with more points than this is smoothed
RATE = "learning rate"


def panels(curves: Mapping[str, Curve]) -> dict[str, list[str]]:
    """Return the keys of each panel by its title: losses first, metrics by name, learning rates last."""
    found: dict[str, list[str]] = {}
    for key in sorted(curves, key=lambda key: (_kind(key), key.count("/"))):  # keys of single classes last
        kind, _, rest = key.partition("/")
        title = "loss" if kind == "loss" else rest.split("/")[1] if kind == "metrics" else RATE
        found.setdefault(title, []).append(key)
    rates = {title: keys for title, keys in found.items() if title == RATE}
    others = {title: keys for title, keys in found.items() if title != RATE}
    shown = [*others.items()][: MAX_PANELS - len(rates)]
    return {title: keys[:MAX_CURVES] for title, keys in (*shown, *rates.items())}


def draw(curves: Mapping[str, Curve], title: str, batches_per_epoch: int | None, left_out: int = 0) -> Any:
    """Return a matplotlib figure of the curves of a run.

    With a number of batches per epoch, a second axis counts epochs. The title says how many curves do not fit,
    including `left_out` curves that are not in `curves`.
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
            handles = [_plot(axes, key, curves[key], COLORS[place]) for place, key in enumerate(keys)]
            finite = [value for key in keys for value in curves[key].values if math.isfinite(value)]
            if name != RATE:  # which often ends at almost 0
                scale(axes, "y", finite)
            axes.set_ylabel(shorten(name) + (", per batch" if name == RATE else ""))
            axes.set_xlim(-0.03 * end, 1.03 * end)
            _count(axes, batches_per_epoch)
            labels = [_label(key, curves[key]) for key in keys]
            add_legend(axes, handles, labels)
    return figure


def _kind(key: str) -> int:
    return ("loss", "metrics").index(key.split("/")[0]) if key.startswith(("loss/", "metrics/")) else 2


def _label(key: str, curve: Curve) -> str:
    """Return the legend of a curve: its name, its smoothing, and where it was not finite."""
    kind, _, rest = key.partition("/")
    if kind == "metrics":
        label, _, name = rest.partition("/")
        rest = "/".join([label, *name.split("/")[1:]])
    elif kind == "loss":
        rest = rest.removesuffix("/total")
    else:
        rest = key.removeprefix("lr-").removesuffix("/group0")
    texts = [shorten(rest)]
    if width := _window(key, curve):
        texts.append(f"smoothed over {width * curve.stride:,} batches")
    lost = [step for step, value in zip(curve.steps, curve.values, strict=True) if not math.isfinite(value)]
    if lost:
        texts.append(f"not finite at batch {lost[0]:,.0f}" + (" and later" if len(lost) > 1 else ""))
    return ",\n".join(texts)


def _plot(axes: Any, key: str, curve: Curve, color: str) -> Any:
    """Draw a curve; of the loss of many single batches a faint one, and a smooth one."""
    width = _window(key, curve)
    if width:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.25, linewidth=0.7)
        (line,) = axes.plot(curve.steps, smooth(curve.values, width), color=color, linewidth=1.4)
        return line
    every = max(1, math.ceil(len(curve.values) / MARKED))
    marker = "" if key.startswith(("loss/train", "lr-")) and len(curve.values) > 2 else "o"
    (line,) = axes.plot(
        curve.steps, curve.values, color=color, marker=marker, markevery=every, markersize=3.5, linewidth=1.2
    )
    return line


def _window(key: str, curve: Curve) -> int:
    """Return the number of points over which a curve is smoothed, odd; 0 for no smoothing."""
    points = len(curve.values)
    return 2 * (points // 60) + 1 if key.startswith("loss/train") and points > SMOOTHED else 0


def _count(axes: Any, batches_per_epoch: int | None) -> None:
    """Label the axis of batches, and add one of epochs above it."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel("batch")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if batches_per_epoch:
        functions = (lambda batch: batch / batches_per_epoch, lambda epoch: epoch * batches_per_epoch)
        above = axes.secondary_xaxis("top", functions=functions)
        above.set_xlabel("epoch")
        above.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return at each point the height of the straight line that fits the points around it best.

    Where there are as many points before as after, that is their mean. Unlike a running mean, the result does not lag
    behind, and follows the curve to both ends. Values that are not finite are left out, and stay gaps. The values are
    evenly spaced; `width` is odd.
    """
    heights = []
    for place, value in enumerate(values):
        first = max(0, place - width // 2)
        end = place + width // 2 + 1
        near = [(one, at) for one, at in enumerate(values[first:end], first) if math.isfinite(at)]
        if not math.isfinite(value) or len(near) < 2:
            heights.append(value)
        elif len(near) == width:
            heights.append(statistics.fmean(values[first:end]))
        else:
            line = statistics.linear_regression(*zip(*near, strict=True))
            heights.append(line.intercept + line.slope * place)
    return heights
