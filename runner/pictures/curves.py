"""The curves of a run: losses, metrics and learning rates over batches, in memory and in a file for sweeps."""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.files.printable import csv_cell
from runner.files.whole import write_atomically

FILE = "learning_curves.csv"
MAX_POINTS = 1024  # more than a screen has columns


class LoggedCurve:
    """The points of one key. When there are too many, neighbors are averaged, so that memory stays bounded.

    Attributes:
        steps: numbers of batches trained, ascending.
        values: values after these batches.
        stride: number of logged values averaged into each point.
    """

    def __init__(self) -> None:
        self.steps = array("d")
        self.values = array("d")
        self.stride = 1
        self._pending: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """Add a value that was logged after batch `step`."""
        if self.stride == 1:
            self.steps.append(step)
            self.values.append(value)
        else:
            self._pending.append((step, value))
            if len(self._pending) < self.stride:
                return
            steps, values = zip(*self._pending, strict=True)
            self.steps.append(sum(steps) / self.stride)
            self.values.append(sum(values) / self.stride)
            self._pending.clear()
        if len(self.steps) >= 2 * MAX_POINTS:
            self.stride *= 2
            self.steps, self.values = (
                array("d", ((a + b) / 2 for a, b in zip(numbers[::2], numbers[1::2], strict=True)))
                for numbers in (self.steps, self.values)
            )

    def snapshot(self) -> tuple[list[tuple[float, float]], list[int]]:
        """Return all (step, value) pairs, those not averaged yet at the end, and the other arguments of `restore`."""
        points = [*zip(self.steps, self.values, strict=True), *self._pending]
        return points, [len(self.steps), self.stride]

    def restore(self, points: Sequence[Sequence[float]], whole: int, stride: int) -> None:
        """Restore the points that `snapshot` returned."""
        pairs = [(step, value) for step, value in points]
        self.steps = array("d", (step for step, _ in pairs[:whole]))
        self.values = array("d", (value for _, value in pairs[:whole]))
        self._pending = pairs[whole:]
        self.stride = stride


def write_curves(folder: Path, curves: Mapping[str, LoggedCurve]) -> None:
    """Write curves to `learning_curves.csv` in a run's folder, with a row for each point.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["key", "batch", "value"])
    for key, curve in curves.items():
        points = zip(curve.steps, curve.values, strict=True)
        rows.writerows([csv_cell(key), f"{step:.10g}", f"{value:.6g}"] for step, value in points)
    write_atomically(folder / FILE, text.getvalue())


def read_curve(folder: Path, key: str) -> LoggedCurve:
    """Return a curve from a run's folder, without values that are not finite; it is empty if it was not written."""
    curve = LoggedCurve()
    try:
        with (folder / FILE).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["key"] == csv_cell(key) and math.isfinite(value := float(row["value"])):
                    curve.add(float(row["batch"]), value)
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return LoggedCurve()
    return curve
