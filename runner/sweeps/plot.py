"""The plot of a sweep: the objective of its jobs against the swept values."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.sweeps.job import show_value

if TYPE_CHECKING:
    from runner.sweeps.summary import SweepJob

MAX_PANELS = 6
MAX_LINES = 8  # lines in a panel
MAX_TICKS = 8  # up to this number of values, each gets a tick
BEST = "#d1495b"
POINT = "#33658a"


def draw(jobs: Sequence[SweepJob], objective: str, path: Path) -> None:
    """Write a plot with a panel for each swept key; the seed gets a panel only if nothing else is swept.

    Points are jobs, and the best one has a ring. If there are few other values, lines connect the means over seeds,
    with error bars of one sample standard deviation.

    Args:
        jobs: jobs with an objective, best first.
        objective: name of the objective.
        path: the file to write; its suffix determines the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [job for job in jobs if math.isfinite(job.loss)]
    keys = [key for key in sorted({key for job in done for key in job.values}) if len(_values(done, key)) > 1]
    panels = ([key for key in keys if key != "seed"] or keys or ["seed"])[:MAX_PANELS]
    figure = Figure(figsize=(max(5.0, 3.4 * len(panels) + 0.8), 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    shared: Any = None
    for position, key in enumerate(panels, start=1):
        axes = shared = figure.add_subplot(1, len(panels), position, sharey=shared)
        places = _place(axes, _values(done, key))
        _fill(axes, done, key, [one for one in panels if one != key], places)
        best = places[show_value(done[0].values.get(key))]
        axes.plot([best], _objectives(done[:1]), "o", markersize=12, fillstyle="none", color=BEST, zorder=4)
        axes.set_xlabel(key)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if position == 1:
            axes.set_ylabel(objective)
        else:
            axes.tick_params(labelleft=False)
    figure.savefig(path)


def _place(axes: Any, values: Sequence[Any]) -> dict[str, float]:
    """Set up the horizontal axis for values, and return their positions: numbers to scale, others side by side."""
    texts = [show_value(one) for one in values]
    numeric = all(_is_number(one) for one in values)
    places = [float(one) for one in values] if numeric else [float(place) for place in range(len(values))]
    steps = [after / before for before, after in itertools.pairwise(places)] if min(places) > 0 else [1.0]
    if numeric and math.prod(steps) >= 10:  # learning rates, for example
        from matplotlib.ticker import FormatStrFormatter, NullFormatter

        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        if min(steps) < 1.5:
            return dict(zip(texts, places, strict=True))
    if len(places) <= MAX_TICKS:
        axes.set_xticks(places, texts, rotation=30 if sum(map(len, texts)) > 40 else 0)
        axes.margins(x=0.1)
    return dict(zip(texts, places, strict=True))


def _fill(axes: Any, jobs: Sequence[SweepJob], key: str, others: Sequence[str], places: Mapping[str, float]) -> None:
    """Draw the jobs of a panel, connected by lines if each line has points at several positions."""
    other = others[0] if len(others) == 1 else None
    lines = [[job for job in jobs if job.values.get(other or "") == value] for value in _values(jobs, other or "")]
    joined = len(others) < 2 and len(lines) <= MAX_LINES and all(len(_values(line, key)) > 1 for line in lines)
    if key == "seed" or not joined:
        axes.plot([places[show_value(job.values.get(key))] for job in jobs], _objectives(jobs), "o", color=POINT)
        if key == "seed":
            _band(axes, _objectives(jobs))
        return
    style = {"marker": "o", "capsize": 3, "linestyle": "-" if all(map(_is_number, _values(jobs, key))) else "none"}
    for line in lines:
        groups = {places[show_value(value)]: _objectives(line, key, value) for value in _values(line, key)}
        means = [statistics.fmean(group) for group in groups.values()]
        spreads = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups.values()]
        label = None if other is None else show_value(line[0].values.get(other))
        bars = axes.errorbar([*groups], means, yerr=spreads if any(spreads) else None, label=label, **style)
        if any(spreads):
            where = [place for place, group in groups.items() for _ in group]
            points = [value for group in groups.values() for value in group]
            axes.plot(where, points, ".", alpha=0.5, color=bars.lines[0].get_color(), zorder=1)
    if other is not None:
        axes.legend(title=other, fontsize="small", framealpha=0.6)


def _band(axes: Any, objectives: Sequence[float]) -> None:
    """Draw the mean over seeds, with a band of one sample standard deviation on either side."""
    if len(objectives) > 1:
        mean = statistics.fmean(objectives)
        spread = statistics.stdev(objectives)
        axes.axhline(mean, color=POINT, linewidth=1.2)
        axes.axhspan(mean - spread, mean + spread, color=POINT, alpha=0.12, linewidth=0)
        axes.set_title(f"mean {mean:.4g}, spread {spread:.2g}", fontsize="medium")


def _objectives(jobs: Sequence[SweepJob], key: str = "", value: Any = None) -> list[float]:
    """Return the objectives of the jobs in which a key has a given value; by default, of all jobs."""
    same = [job for job in jobs if show_value(job.values.get(key)) == show_value(value)]
    return [job.result.objective for job in same if job.result.objective is not None]


def _values(jobs: Sequence[SweepJob], key: str) -> list[Any]:
    """Return the values of a key over all jobs: sorted numbers, then other values sorted as text."""
    found = {show_value(job.values.get(key)): job.values.get(key) for job in jobs}
    numbers = [one for one in found.values() if _is_number(one)]
    return [*sorted(numbers), *(found[text] for text in sorted(found) if not _is_number(found[text]))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
