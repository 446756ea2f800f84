"""Draws a picture of the run: losses, metrics and learning rates against the batch."""

from __future__ import annotations

import io
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination, Record
from runner.callbacks._disk import disk_errors_reported
from runner.files.whole import write_whole
from runner.terminal import in_notebook, show_in_cell

if TYPE_CHECKING:
    from runner import Logger, State

MAX_POINTS = 1024  # more than a screen has columns for
MAX_CURVES = 12  # in a panel; a longer legend would cover the curves
PANELS = {"loss": "loss/", "metrics": "metrics/", "learning rate": "lr-"}


class LearningCurves(LoggerDestination):
    """Draws losses, metrics and, if they are logged, learning rates at FIT_END.

    The picture is written to the run's folder, logged as an artifact in the folder 'plots', and shown in a notebook.
    For each key it keeps a bounded number of points, each the mean of equally many neighbours, so memory and
    checkpoints stay small; a resumed run draws the curves from the beginning. The loss of single batches is drawn
    faintly behind its running mean. A panel shows at most 12 keys.

    Args:
        filename: name of the picture; its suffix determines the format.

    Raises:
        ValueError: `filename` is not the name of a PNG, SVG or PDF file.
    """

    def __init__(self, filename: str = "learning_curves.png") -> None:
        if "/" in filename or not filename.endswith((".png", ".svg", ".pdf")):
            raise ValueError(f"filename={filename!r}: must be the name of a file that ends in .png, .svg or .pdf")
        self.filename = filename
        self._curves: dict[str, _Curve] = {}
        self._ignored: set[str] = set()  # keys that are not drawn
        self._logger: Logger | None = None

    def init(self, state: State, logger: Logger) -> None:
        self._logger = logger

    def log_records(self, records: Sequence[Record]) -> None:
        curves = self._curves
        ignored = self._ignored
        for record in records:
            for key, value in record.metrics.items():
                if key in ignored:
                    continue
                if key in curves:
                    curves[key].add(record.step, value)
                elif key.startswith(tuple(PANELS.values())):
                    curves[key] = _Curve()
                    curves[key].add(record.step, value)
                else:
                    ignored.add(key)

    def fit_end(self, state: State, logger: Logger) -> None:
        logger.flush()  # the intended host-device sync, once per fit
        if not self._curves:
            return
        picture = io.BytesIO()
        path = state.run_dir / self.filename
        draw(self._curves).savefig(picture, format=path.suffix[1:])
        if in_notebook():
            show_in_cell(picture.getvalue(), path.suffix[1:])
        with disk_errors_reported(self.config_key):
            write_whole(path, picture.getvalue())
            logger.log_artifact(path, "plots")

    def state_dict(self) -> dict[str, Any]:
        if self._logger is not None:
            self._logger.flush()  # the checkpoint includes everything logged before it
        return {key: curve.state_dict() for key, curve in self._curves.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, saved in state.items():
            self._curves[key] = _Curve()
            self._curves[key].load_state_dict(saved)


class _Curve:
    """The points of one key; neighbours are averaged whenever there are too many."""

    def __init__(self) -> None:
        self.steps = array("d")
        self.values = array("d")
        self._stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        if self._stride == 1:
            self.steps.append(step)
            self.values.append(value)
        else:
            self._pending.append((step, value))
            if len(self._pending) < self._stride:
                return
            for points, numbers in zip((self.steps, self.values), zip(*self._pending, strict=True), strict=True):
                points.append(sum(numbers) / self._stride)
            self._pending.clear()
        if len(self.steps) >= 2 * MAX_POINTS:
            self._stride *= 2
            self.steps, self.values = (
                array("d", ((a + b) / 2 for a, b in zip(one[::2], one[1::2], strict=True)))
                for one in (self.steps, self.values)
            )

    def state_dict(self) -> dict[str, Any]:
        pending = [list(point) for point in self._pending]
        return {"steps": list(self.steps), "values": list(self.values), "stride": self._stride, "pending": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = array("d", state["steps"])
        self.values = array("d", state["values"])
        self._stride = state["stride"]
        self._pending = [tuple(point) for point in state["pending"]]


def draw(curves: Mapping[str, Any]) -> Any:
    """Return a matplotlib figure with one panel each for losses, metrics and learning rates that exist.

    Args:
        curves: curves by key; each has `steps` and `values`, sequences of numbers of equal length.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {title: [key for key in curves if key.startswith(prefix)] for title, prefix in PANELS.items()}
    panels = {title: keys for title, keys in panels.items() if keys}
    figure = Figure(figsize=(4.5 * len(panels), 3.4), dpi=100)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.16 / len(panels), right=1 - 0.04 / len(panels), bottom=0.14, top=0.9, wspace=0.22)
    for position, (title, keys) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), position)
        for key in sorted(keys, key=lambda key: key.count("/"))[:MAX_CURVES]:  # keys of single classes last
            _plot(axes, key, curves[key].steps, curves[key].values)
        axes.set_title(title if len(keys) <= MAX_CURVES else f"{title}, {MAX_CURVES} of {len(keys):,}")
        axes.set_xlabel("batch")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", framealpha=0.6)
    return figure


def _plot(axes: Any, key: str, steps: Any, values: Any) -> None:
    label = key.removeprefix("loss/").removeprefix("metrics/").removesuffix("/total")
    if key.startswith("loss/train") and len(values) > 20:
        (faint,) = axes.plot(steps, values, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _running_mean(values), color=faint.get_color(), label=label)
    else:
        axes.plot(steps, values, marker="o" if len(values) < 50 else "", markersize=3, label=label)


def _running_mean(values: Any) -> list[float]:
    """Return the exponential moving average over about 30 points, corrected for its bias at the start."""
    keep = 1 - 30 / len(values) if len(values) > 60 else 0.5
    means = []
    mean = 0.0
    weight = 0.0
    for value in values:
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        means.append(mean / weight)
    return means
