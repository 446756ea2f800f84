"""What some sweeps find out beyond the ranking of their settings, such as the law of a ladder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.sweeps.settings import Table


@dataclass(frozen=True)
class Analysis:
    """An analysis of a sweep, for its final output, its files and its report.

    Attributes:
        name: its name in files and in `results.json`, such as `ladder`.
        lines: labels and texts to print below the settings.
        table: its table, also written as `NAME.csv`.
        metrics: metrics of the sweep.
        json: the same for programs.
        draw: returns its figure.
    """

    name: str
    lines: Sequence[tuple[str, str]]
    table: Table
    metrics: dict[str, float]
    json: dict[str, Any]
    draw: Callable[[], Any]
