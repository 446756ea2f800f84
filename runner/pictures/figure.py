"""The style, scales and files of all plots. Matplotlib is imported only when a plot is drawn."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

DPI = 200
"""Pixels per inch, twice those of a screen, so that an enlarged picture stays sharp."""
COLORS = ("#2f6690", "#d1495b", "#3a7d44", "#e09f3e", "#7b4b94", "#17a2a2", "#8d5b4c", "#5c677d")
GRAY = "#b8bec6"
DECADES = 2.0  # an axis is logarithmic if its values span at least this many powers of ten


@contextmanager
def style() -> Iterator[None]:
    """Within the context, draw in the style of all pictures. A `$` in a run's name does not start a formula."""
    import matplotlib

    settings: Any = {
        "text.parse_math": False,
        "svg.fonttype": "none",  # text is not converted to paths
        "svg.hashsalt": "runner",  # the same picture gives the same file
        "font.size": 9.0,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": "medium",
        "legend.fontsize": "small",
        "legend.framealpha": 0.6,
        "axes.formatter.useoffset": False,
    }
    with matplotlib.rc_context(settings):
        yield


def make_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, sized in inches, that is not part of a user's interactive session."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render(figure: Any, kind: str) -> bytes:
    """Return a figure as the content of a PNG, SVG or PDF file."""
    content = io.BytesIO()
    with warnings.catch_warnings(), style():
        warnings.simplefilter("ignore")  # of a missing glyph or a tight layout, about which a user can do nothing
        figure.savefig(content, format=kind, metadata={"svg": {"Date": None}}.get(kind))
    return content.getvalue()


def is_logarithmic(values: Iterable[float], decades: float = DECADES) -> bool:
    """Return whether all finite values are positive and span at least `decades` powers of ten."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and math.log10(max(finite)) - math.log10(min(finite)) >= decades


def scale(axes: Any, which: str, values: Sequence[float], decades: float = DECADES) -> None:
    """Make the axis 'x' or 'y' logarithmic, with plain numbers at its ticks, if its values span enough decades."""
    if not is_logarithmic(values, decades):
        return
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    if not is_logarithmic(values, decades=2.0):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FormatStrFormatter("%g"))
    axis.set_minor_formatter(NullFormatter())


def shorten(text: str, length: int = 28) -> str:
    """Return text, without its middle if it is too long for a picture."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2]}…{text[len(text) - (length - 1) // 2 :]}"


def add_legend(axes: Any, handles: Sequence[Any], labels: Sequence[str], **options: Any) -> None:
    """Add a legend. Users' labels may begin with an underscore, and matplotlib would leave those out."""
    if handles:
        axes.legend(handles, [f"\u200b{label}" if label.startswith("_") else label for label in labels], **options)
