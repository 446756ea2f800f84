"""Prints the final and the best value of each loss and metric as a table."""

from __future__ import annotations

from dataclasses import dataclass

from runner import Timestamp
from runner.terminal import epoch_number, make_console

MAX_METRICS = 8


@dataclass(slots=True)
class Series:
    """What is remembered of the values of one loss or metric."""

    lower_is_better: bool
    final: float
    best: float
    best_at: Timestamp


def print_metrics(series: dict[str, Series]) -> None:
    """Print a line with the final and best value, and when the best was reached, for each of the first metrics."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column, justify in (("metric", "left"), ("final", "right"), ("best", "right"), ("at", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    # Evaluators come first, because runs are compared by their metrics; totals come before single classes.
    keys = sorted(series, key=lambda key: (key.count("/"), key.split("/")[1] == "train", key.startswith("loss/")))
    for key in keys[:MAX_METRICS]:
        one = series[key]
        table.add_row(
            key, f"{one.final:.4g}", f"{one.best:.4g}", f"epoch {epoch_number(one.best_at)}, batch {one.best_at.batch}"
        )
    console = make_console()
    if keys:
        console.print(table)
    if len(keys) > MAX_METRICS:
        console.print(f"and {len(keys) - MAX_METRICS} more, in the log of the run")
