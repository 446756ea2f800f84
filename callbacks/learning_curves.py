"""Draws a picture of the run: losses, metrics and learning rates against batches and epochs."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner import LoggerDestination, MetricRecord
from runner.callbacks._curves_picture import draw, panels
from runner.callbacks._disk import disk_errors_reported
from runner.callbacks._rates import copy_rates, make_keys
from runner.failures.errors import wrong_argument
from runner.files.values import InnerPath
from runner.files.whole import write_atomically
from runner.pictures.curves import LoggedCurve, write_curves
from runner.pictures.figure import render
from runner.terminal.console import in_notebook, show_in_cell

if TYPE_CHECKING:
    from runner import Logger, State

KEPT = ("loss/", "metrics/")
RATES = "lr-"
MIN_BATCHES = 10  # of a run with a picture; fewer take longer to draw than to train


class LearningCurves(LoggerDestination):
    """Draws losses, metrics and learning rates at FIT_END.

    The picture is written to the run's folder with its points, `learning_curves.csv`, from which a sweep draws its
    report. It is logged as an artifact in the folder 'plots', and shown in a notebook; a run of fewer than ten batches
    has only the points. Only curves that fit in the picture are kept, each with a bounded number of points that are
    means over equally many neighbors, so memory and checkpoints stay small; a resumed run draws the curves from the
    beginning. The losses of single batches are drawn faintly behind a smoothed curve. Learning rates need no other
    callback; those that are tensors on a GPU are read when the run is saved or ends, so training never waits for them.

    Args:
        filename: name of the picture; its suffix determines the format.

    Raises:
        ValueError: `filename` is not the name of a PNG, SVG or PDF file.
    """

    def __init__(self, filename: InnerPath = "learning_curves.png") -> None:
        if "/" in filename or not filename.endswith((".png", ".svg", ".pdf")):
            raise wrong_argument("filename", filename, "must be the name of a file that ends in .png, .svg or .pdf")
        self.filename = filename
        self._curves: dict[str, LoggedCurve] = {}
        self._ignored: set[str] = set()  # keys that are not drawn
        self._left_out = 0  # number of those for which the picture has no room
        self._rates: dict[str, LoggedCurve] = {}  # learning rates by key
        self._unread: list[tuple[int, dict[str, Any]]] = []  # batches, and rates that may still be on a GPU
        self._next_rates = 0  # the next batch whose rates are drawn
        self._logger: Logger | None = None

    @property
    def curves(self) -> dict[str, LoggedCurve]:
        """The losses, metrics and learning rates by key, as they were at the last checkpoint or the end."""
        return self._curves | self._rates

    def init(self, state: State, logger: Logger) -> None:
        self._logger = logger

    def fit_start(self, state: State, logger: Logger) -> None:
        self._next_rates = next_point(state.timestamp.batch)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch + 1
        if batch >= self._next_rates:
            self._next_rates = next_point(batch)
            self._keep_rates(state, batch)

    def log_records(self, records: Sequence[MetricRecord]) -> None:
        curves = self._curves
        ignored = self._ignored
        for record in records:
            for key, value in record.metrics.items():
                if key in ignored:
                    continue
                if key in curves:
                    curves[key].add(record.step, value)
                elif not key.startswith(KEPT):
                    ignored.add(key)
                elif self._add_curve(key):
                    curves[key].add(record.step, value)

    def _add_curve(self, key: str) -> bool:
        """Add a curve and return whether it fits in the picture. Curves that sort after it may be dropped for it."""
        self._curves[key] = LoggedCurve()
        drawn = {name for names in panels(self._curves).values() for name in names}
        for name in self._curves.keys() - drawn:
            del self._curves[name]
            self._ignored.add(name)
            self._left_out += 1
        return key in drawn

    def fit_end(self, state: State, logger: Logger) -> None:
        logger.flush()  # the intended host-device sync, once per fit
        if not any(curve.steps for curve in self._curves.values()):
            return
        self._keep_rates(state, state.timestamp.batch)
        self._read_rates()
        curves = {key: curve for key, curve in self.curves.items() if curve.steps}
        with disk_errors_reported(self.config_key):
            write_curves(state.run_dir, {key: curves[key] for keys in panels(curves).values() for key in keys})
            if state.timestamp.batch >= MIN_BATCHES:
                self._draw(curves, state, logger)

    def _draw(self, curves: Mapping[str, LoggedCurve], state: State, logger: Logger) -> None:
        path = state.run_dir / self.filename
        now = state.timestamp
        length = state.train_dataloader_len or 0
        epochs_are_alike = now.batch == now.epoch * length + now.batch_in_epoch
        figure = draw(curves, state.run_name, length if epochs_are_alike else None, self._left_out)
        picture = render(figure, path.suffix[1:])
        if in_notebook():
            show_in_cell(picture, path.suffix[1:])
        write_atomically(path, picture)
        logger.log_artifact(path, "plots")

    def state_dict(self) -> dict[str, Any]:
        if self._logger is not None:
            self._logger.flush()  # the checkpoint includes everything logged before it
        self._read_rates()
        import torch

        saved = {key: curve.snapshot() for key, curve in self.curves.items()}
        points = [point for pairs, _ in saved.values() for point in pairs]
        return {
            # One tensor (N, 2) of steps and values for all curves: each tensor of a checkpoint takes up extra space.
            "points": torch.tensor(points, dtype=torch.float64).reshape(-1, 2),
            "curves": {key: [len(pairs), *facts] for key, (pairs, facts) in saved.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        start = 0
        for key, (count, whole, stride) in state["curves"].items():
            curve = (self._rates if key.startswith(RATES) else self._curves)[key] = LoggedCurve()
            curve.restore(state["points"][start : start + count].tolist(), whole, stride)
            start += count

    def _keep_rates(self, state: State, batch: int) -> None:
        """Keep the learning rates of a batch."""
        rates = zip(make_keys(state.optimizers), copy_rates(state.optimizers), strict=True)
        self._unread.append((batch, dict(rates)))

    def _read_rates(self) -> None:
        for batch, rates in self._unread:
            for key, rate in rates.items():
                curve = self._rates.setdefault(key, LoggedCurve())
                if curve.steps[-1:] != array("d", [batch]):
                    curve.add(batch, float(rate))  # the intended host-device sync, at checkpoints and the end
        self._unread.clear()


def next_point(batch: int) -> int:
    """Return the next batch whose learning rates are drawn: all of the first 256, then 128 until each power of 2."""
    stride = 1 << (batch // 256).bit_length()
    return (batch // stride + 1) * stride
