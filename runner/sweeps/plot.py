"""The picture of a sweep: curves, parallel coordinates, and the effect of each swept key on the objective."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from runner.pictures.curves import LoggedCurve
from runner.pictures.figure import COLORS, GRAY, add_legend, is_logarithmic, make_figure, scale, shorten, style
from runner.sweeps.names import short_names, show_value
from runner.sweeps.objectives import draw_front, draw_importances
from runner.sweeps.settings import REPEATED, Setting, SweepJob, is_number

COLUMNS = 3  # panels of effects side by side
MAX_EFFECTS = 9
MAX_AXES = 8  # axes of parallel coordinates, besides the objective
MAX_LINES = 200  # settings drawn as lines, best first: more would hide one another, and take minutes to draw
MAX_MEANS = 15  # means are drawn only for keys with at most this many values
MAX_TICKS = 8  # ticks of an axis, if each value gets one
GRID = 200  # points of a mean curve
POINT = "#33658a"
BEST = "#d1495b"


def draw(
    settings: Sequence[Setting],
    objective: str,
    curves: Mapping[str, LoggedCurve],
    objectives: Mapping[str, bool] = MappingProxyType({}),
    importances: Mapping[str, float] = MappingProxyType({}),
) -> Any:
    """Return a figure of a sweep.

    Args:
        settings: the settings, best first; the first has an objective.
        objective: the name of the objective.
        curves: the objective over batches, by job; jobs may be missing.
        objectives: whether lower is better, by objective, if there are several.
        importances: the importance of each swept key.
    """
    measured = [setting for setting in settings if setting.objectives]
    keys = _keys(measured)
    varied = [key for key in keys if key not in REPEATED]
    effects = (varied or keys[:1])[:MAX_EFFECTS]
    panels: list[Callable[[Any], None]] = []
    if curves:
        panels.append(partial(_draw_curves, settings=measured[:MAX_LINES], objective=objective, curves=curves))
    if len(varied) > 1:
        parallel = partial(_draw_parallel, settings=measured[:MAX_LINES], keys=varied[:MAX_AXES], objective=objective)
        panels.append(parallel)
    for name in [*objectives][1:]:
        panels.append(partial(draw_front, settings=measured, objectives=objectives, across=name))
    if importances:
        panels.append(partial(draw_importances, shares=importances))
    for key in effects:
        has_legend = key == effects[0]
        panels.append(partial(_draw_effect, settings=measured, key=key, objective=objective, has_legend=has_legend))
    rows = [panels[:2], *(panels[first : first + COLUMNS] for first in range(2, len(panels), COLUMNS))]
    heights = [4.4, *(3.3 for _ in rows[1:])]
    with style():
        figure = make_figure(12.0, sum(heights) + 0.4)
        subfigures = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
        for subfigure, row in zip(subfigures, rows, strict=True):
            columns = 2 if row is rows[0] else COLUMNS
            for column, draw_panel in enumerate(row, start=1):
                draw_panel(subfigure.add_subplot(1, columns, column))
    return figure


def color_of(rank: int) -> str:
    """Return the color of a setting by its rank, counted from 0; settings after the first few are gray."""
    return COLORS[rank] if rank < len(COLORS) else GRAY


def _draw_curves(axes: Any, settings: Sequence[Setting], objective: str, curves: Mapping[str, LoggedCurve]) -> None:
    """Draw the objective over batches: each setting's mean over its runs, with a band of one standard deviation."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    legend: list[tuple[str, Any]] = []
    heights: list[float] = []
    has_band = False
    for rank in reversed(range(len(settings))):  # the best setting is drawn last, above the others
        names = [job.result.name for job in settings[rank].measured]
        known = [curves[name] for name in names if name in curves]
        if not known:
            continue
        steps, values = _on_grid(known)
        mean = values.mean(axis=0)
        heights += [*mean]
        marker = "o" if len(steps) <= 20 else ""
        style = {"color": color_of(rank), "linewidth": 0.8 if rank >= len(COLORS) else 1.6, "zorder": 3 - rank / 1e4}
        (line,) = axes.plot(steps, mean, marker=marker, markersize=3, **style)
        if rank < len(COLORS):
            legend.insert(0, (shorten(settings[rank].name, 36), line))
            if len(values) > 1:
                has_band = True
                spread = np.std(values, axis=0, ddof=1)
                axes.fill_between(steps, mean - spread, mean + spread, color=color_of(rank), alpha=0.15, linewidth=0)
    if len(settings) > len(COLORS):
        legend.append((f"{len(settings) - len(COLORS)} more", axes.plot([], [], color=GRAY)[0]))
    labels, handles = zip(*legend, strict=True)
    add_legend(axes, handles, labels, title="best first" if len(legend) > 1 else None)
    of_best = f" of the best {MAX_LINES} settings" if len(settings) == MAX_LINES else ""
    axes.set_title(f"curves{of_best}" + (": mean over runs, band of one standard deviation" if has_band else ""))
    axes.set_xlabel("batch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(shorten(objective))
    scale(axes, "y", heights)


def _on_grid(curves: Sequence[LoggedCurve]) -> tuple[Any, Any]:
    """Return the batches `(P,)` of the range that curves share, and the values of each curve at these, `(C, P)`."""
    import numpy as np

    first = max(curve.steps[0] for curve in curves)
    last = min(curve.steps[-1] for curve in curves)
    steps = np.unique(np.concatenate([np.asarray(curve.steps) for curve in curves]))
    steps = steps[(first <= steps) & (steps <= max(first, last))]
    if len(steps) > GRID:
        steps = np.linspace(steps[0], steps[-1], GRID)
    return steps, np.stack([np.interp(steps, np.asarray(curve.steps), np.asarray(curve.values)) for curve in curves])


def _draw_parallel(axes: Any, settings: Sequence[Setting], keys: Sequence[str], objective: str) -> None:
    """Draw each setting as a line through its values on the axes of the keys, to its mean on the objective's axis."""
    means = [setting.mean or 0.0 for setting in settings]
    scales = [_Scale([setting.values.get(key) for setting in settings]) for key in keys]
    scales.append(_Scale(means))
    for rank in reversed(range(len(settings))):
        values = [*(settings[rank].values.get(key) for key in keys), means[rank]]
        heights = [axis.height(value) for axis, value in zip(scales, values, strict=True)]
        width = 1.8 if rank < len(COLORS) else 0.7
        axes.plot(range(len(scales)), heights, color=color_of(rank), linewidth=width, zorder=3 - rank / 1e4)
    for column, axis in enumerate(scales):
        axes.axvline(column, color="#444444", linewidth=0.8, zorder=4)
        for height, text in axis.ticks():
            label = axes.annotate(shorten(text, 16), (column, height), (3, 0), textcoords="offset points", zorder=5)
            label.set(fontsize="small", va="center", bbox={"fc": "white", "ec": "none", "alpha": 0.75, "pad": 0.6})
    names = [*short_names(keys).values(), objective]
    axes.set_xticks(range(len(scales)), [shorten(name, 96 // len(names)) for name in names])
    axes.set(yticks=[], xlim=(-0.15, len(scales) - 0.6), ylim=(-0.05, 1.05))
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    which = f"the best {MAX_LINES} settings" if len(settings) == MAX_LINES else "each setting"
    axes.set_title(f"{which}: from its values to its mean objective")


class _Scale:
    """A vertical axis from 0 to 1: numbers are drawn to scale, other values at equal distances."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = sort_values(values)
        self._texts = [show_value(value) for value in self._values]
        self._is_numeric = all(map(is_number, self._values))
        self._zero = _position_of_zero(self._values) if self._is_numeric else 0.0
        self._is_log = self._is_numeric and is_logarithmic([value or self._zero for value in self._values], decades=1.0)
        self._low = self._number(self._values[0])
        self._high = self._number(self._values[-1])

    def height(self, value: Any) -> float:
        """Return the height of a value."""
        return 0.5 if self._high == self._low else (self._number(value) - self._low) / (self._high - self._low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the height and text of each tick: all values if there are few, else round numbers or some texts."""
        if self._is_numeric and len(self._values) > MAX_TICKS:
            from matplotlib.ticker import LogLocator, MaxNLocator

            locator = LogLocator() if self._is_log else MaxNLocator(6)
            first = self._values[0]
            last = self._values[-1]
            shown = [value for value in locator.tick_values(first, last) if first <= value <= last]
        else:
            shown = self._values[:: math.ceil(len(self._values) / (2 * MAX_TICKS))]
        return [(self.height(value), show_value(value)) for value in shown]

    def _number(self, value: Any) -> float:
        if not self._is_numeric:
            return float(self._texts.index(show_value(value)))
        return math.log10(value or self._zero) if self._is_log else float(value)


def _position_of_zero(values: Sequence[float]) -> float:
    """Return the position of 0 among a few values: on a logarithmic axis, a tenth of the smallest other value."""
    nonzero = [value for value in values if value != 0]
    is_log = 0 < len(nonzero) < len(values) <= MAX_TICKS and is_logarithmic(nonzero, decades=1.0)
    return min(nonzero) / 10 if is_log else 0.0


def _draw_effect(axes: Any, settings: Sequence[Setting], key: str, objective: str, has_legend: bool) -> None:
    """Draw the objective of each run against a swept key, with the mean and standard deviation at each value."""
    values = sort_values([job.values.get(key) for setting in settings for job in setting.measured])
    positions = _set_up_axis(axes, values)
    is_numeric = all(map(is_number, values))
    groups: dict[float, list[float]] = {position: [] for position in positions.values()}
    points: list[tuple[float, float]] = []
    for setting in settings:
        for job in setting.measured:
            position = positions[show_value(job.values.get(key))]
            # At a text value, the first run is centered and later ones are shifted sideways, so that fewer overlap.
            offset = 0.0 if is_numeric else 0.2 * ((len(groups[position]) * 0.618034 + 0.5) % 1.0 - 0.5)
            groups[position].append(_objective(job))
            points.append((position + offset, _objective(job)))
    circle = {"marker": "o", "linestyle": "none", "fillstyle": "none"}
    legend = {"circle: one run": _plot(axes, points, color=POINT, markersize=4.5, alpha=0.7, zorder=3, **circle)}
    if key in REPEATED:
        legend |= _draw_mean(axes, settings[0])
    else:
        legend |= _draw_means(axes, groups, is_numeric)
        best = points[: len(settings[0].measured)]
        legend["ring: best setting"] = _plot(axes, best, color=BEST, markersize=9, zorder=4, **circle)
    if has_legend:
        add_legend(axes, [*legend.values()], [*legend])
    axes.set_xlabel(shorten(key, 40))
    axes.set_ylabel(shorten(objective))
    scale(axes, "y", [value for _, value in points])


def _plot(axes: Any, points: Sequence[tuple[float, float]], **options: Any) -> Any:
    (line,) = axes.plot(*zip(*points, strict=True), **options)
    return line


def _draw_means(axes: Any, groups: Mapping[float, Sequence[float]], is_numeric: bool) -> dict[str, Any]:
    """Draw the mean of each group of runs with its standard deviation; if each is a single run, draw only a line."""
    means = [(position, statistics.fmean(values)) for position, values in groups.items()]
    if len(groups) > MAX_MEANS:
        return {}
    if all(len(values) == 1 for values in groups.values()):
        if is_numeric:
            _plot(axes, means, color="black", linewidth=0.8)
        return {}
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in groups.values()]
    kind = {"fmt": "-s" if is_numeric else "s", "color": "black", "markersize": 4, "capsize": 4, "linewidth": 1}
    return {"square: mean; bar: 1 standard deviation": axes.errorbar(*zip(*means, strict=True), spreads, **kind)}


def _draw_mean(axes: Any, setting: Setting) -> dict[str, Any]:
    """Draw the mean over runs, with a band of one sample standard deviation on either side."""
    mean = setting.mean or 0.0
    spread = setting.spread
    if spread is None:
        return {}
    axes.set_title(f"mean {mean:.4g}, standard deviation {spread:.2g}, n = {len(setting.objectives)}")
    band = axes.axhspan(mean - spread, mean + spread, color=POINT, alpha=0.12, linewidth=0)
    return {"line: mean": axes.axhline(mean, color=POINT, linewidth=1.2), "band: 1 standard deviation": band}


def _set_up_axis(axes: Any, values: Sequence[Any]) -> dict[str, float]:
    """Set up the horizontal axis for values; return their positions by text: numbers to scale, others side by side."""
    texts = [show_value(value) for value in values]
    is_numeric = all(map(is_number, values))
    positions = [float(index) for index in range(len(values))]
    if is_numeric:
        positions = [float(value or _position_of_zero(values)) for value in values]
        scale(axes, "x", positions, decades=1.0)  # logarithmic for learning rates, for example
    is_crowded = is_numeric and (len(positions) > MAX_TICKS or not _have_room(axes, positions))
    if not is_crowded:
        step = math.ceil(len(positions) / 12)
        shown = [shorten(text, 16) for text in texts][::step]
        axes.set_xticks(positions[::step], shown)
        if sum(map(len, shown)) > 36:
            axes.tick_params(axis="x", labelrotation=30)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
        axes.set_xticks([], minor=True)
    axes.margins(x=0.12)
    return dict(zip(texts, positions, strict=True))


def _have_room(axes: Any, positions: Sequence[float]) -> bool:
    """Return whether ticks at these positions leave room for their texts."""
    drawn = [math.log10(position) for position in positions] if axes.get_xscale() == "log" else [*positions]
    gaps = [after - before for before, after in itertools.pairwise(drawn)]
    return not gaps or min(gaps) > 0.08 * (drawn[-1] - drawn[0])


def sort_values(values: Sequence[Any]) -> list[Any]:
    """Return the distinct values: sorted numbers, then other values sorted as text."""
    by_text = {show_value(value): value for value in values}
    numbers = [value for value in by_text.values() if is_number(value)]
    return [*sorted(numbers), *(by_text[text] for text in sorted(by_text) if not is_number(by_text[text]))]


def _keys(settings: Sequence[Setting]) -> list[str]:
    """Return the swept keys that have several values."""
    jobs = [job for setting in settings for job in setting.measured]
    keys = sorted({key for job in jobs for key in job.values})
    return [key for key in keys if len({show_value(job.values.get(key)) for job in jobs}) > 1]


def _objective(job: SweepJob) -> float:
    return math.nan if job.result.objective is None else job.result.objective
