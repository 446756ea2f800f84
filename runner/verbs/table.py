"""`runner table`: writes means over seeds as a table for a paper; only significantly better ones are bold.

It shows the mean of a metric, its 95 % interval and the number of runs. The words name the runs as in `runner
verdict`: folders, globs and conditions; without them, all runs in outputs/ count. `--rows` and `--columns` are config
groups or keys, such as model,optimizer.lr, or `verb`, which adds baselines as `eval`; without `--rows`, the first group
or key that differs. A mean is bold if it is significantly better than every other mean in its column, and never if runs
were evaluated or trained differently. Comments list the folders of the runs; in CSV, a column does. Results from
elsewhere count as in `runner verdict`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.cli.command import Command
from runner.comparing.candidates import (
    Candidate,
    FinishedRun,
    common_metric,
    describe_foreign,
    find_candidate,
    pair_up,
)
from runner.comparing.conditions import refuse_short_key, to_number, to_text
from runner.comparing.decision import bootstrap, find_ties
from runner.comparing.foreign_results import Columns
from runner.comparing.side_by_side import describe_bases
from runner.failures.errors import WrongKey
from runner.files.printable import csv_cell, printable
from runner.records.listing import SavedFolder
from runner.terminal.answer import set_fields

KEY = "RUNS"
Place = tuple[str, ...]
"""The values of the keys of a row or column, as text."""
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}


@dataclass
class Cell:
    """A setting in a table, the metric of its runs, and the 95 % interval of their mean; None for a single run."""

    candidate: Candidate
    values: list[float]
    interval: tuple[float, float] | None
    is_best: bool = False

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return math.fsum(self.values) / len(self.values)

    def show(self) -> str:
        """Return the mean and its interval, rounded to the precision that the interval justifies."""
        if self.interval is None:
            return f"{self.mean:.4g}"
        low, high = self.interval
        if high <= low:
            return f"{self.mean:.4g} [{low:.4g}, {high:.4g}]"
        decimals = min(max(1 - math.floor(math.log10((high - low) / 2)), 0), 12)
        return f"{self.mean:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


@dataclass(frozen=True)
class Table:
    """Settings by the values of keys.

    A place holds the values of the keys of a row or column; without column keys, the only column has no values. The
    notes list other keys that the means average over, and reasons why a column has no verdict.
    """

    metric: str
    keys: tuple[Sequence[str], Sequence[str]]
    rows: list[Place]
    columns: list[Place]
    cells: dict[tuple[Place, Place], Cell]
    notes: list[str]


def run(command: Command) -> None:
    """Print the mean of a metric over seeds, in rows and columns by keys."""
    options = command.options
    by_verb = "verb" in (*options["rows"], *options["columns"])
    columns = Columns(options["metric"], options["seed_column"], options["setting_column"])
    candidate = find_candidate(" ".join(command.words), KEY, columns, with_baselines=by_verb)
    if not candidate.runs:
        raise WrongKey(KEY, "none of these runs has finished", repr(candidate.name))
    metric, lower = common_metric([candidate], options["metric"], "--metric", options["better"])
    differing = [*candidate.choices] or [*candidate.varying]
    across = _keys(command, "columns", candidate)
    rows = _keys(command, "rows", candidate) or [key for key in differing[:1] if key not in across]
    table = make_table(candidate, metric, lower, rows, across)
    table.notes.extend(f"{name}: {text}" for name, text in describe_foreign([candidate]))
    if (bases := describe_bases(run.saved.result for run in candidate.runs)) is not None:
        table.notes.append(f"{bases}; --rows base separates them")
    set_fields(result=as_data(table))
    print({"markdown": as_markdown, "latex": as_latex, "csv": as_csv}[command.options["format"]](table), end="")


def make_table(candidate: Candidate, metric: str, lower: bool, rows: Sequence[str], columns: Sequence[str]) -> Table:
    """Group the runs of a candidate by the values of keys."""
    groups: dict[tuple[Place, Place], list[FinishedRun]] = {}
    for run in candidate.runs:
        groups.setdefault((_place(run.saved, rows), _place(run.saved, columns)), []).append(run)
    missing: dict[tuple[Place, Place], list[SavedFolder]] = {}
    for left_out in candidate.left_out:
        missing.setdefault((_place(left_out, rows), _place(left_out, columns)), []).append(left_out)
    cells = {}
    for place, runs in groups.items():
        settings = zip([*rows, *columns], sum(place, ()), strict=True)
        name = ", ".join(f"{key}={value}" for key, value in settings) or "all"
        cell = Candidate(name, runs, missing.get(place, []))
        values = [*cell.values(metric, [*cell.varying]).values()]
        cells[place] = Cell(cell, values, bootstrap(np.asarray(values)))
    varying = [{(key, *values) for key, values in cell.candidate.varying.items()} for cell in cells.values()]
    shared = {key for key, *_ in set.intersection(*varying)} if len(cells) > 1 else set()
    for cell in cells.values():
        alone = [key for key in cell.candidate.varying if key not in shared]
        if alone:
            name = [*cell.candidate.choices, *alone][0]
            reason = f"the runs of {cell.candidate.name} differ in {name}; add it to --rows or --columns"
            raise WrongKey(KEY, f"{reason}, or choose one value: {name}=...", repr(candidate.name))
    notes = [f"each mean is also taken over {', '.join(sorted(shared))}"] if shared else []
    row_values, column_values = _sorted(row for row, _ in cells), _sorted(column for _, column in cells)
    table = Table(metric, (rows, columns), row_values, column_values, cells, notes)
    _mark_best(table, lower)
    return table


def _mark_best(table: Table, lower: bool) -> None:
    """Mark in each column the cell that is better than all others, if any."""
    for column in table.columns:
        cells = [cell for (_, place), cell in table.cells.items() if place == column]
        leader, *rivals = sorted(cells, key=lambda cell: cell.mean if lower else -cell.mean)
        try:
            samples = [pair_up(leader.candidate, cell.candidate, table.metric, KEY) for cell in rivals]
        except ValueError as error:
            table.notes.append(f"no verdict on {' '.join(column) or 'the rows'}: {error}")
            continue
        leader.is_best = bool(samples) and not any(find_ties(samples)) and "diverged" not in leader.candidate.missing


def as_markdown(table: Table) -> str:
    """Return a table in Markdown."""
    lines = _texts(table, _escape_markdown, "**{}**")
    rule = ["---"] * len(table.keys[0]) + ["---:"] * (len(lines[0]) - len(table.keys[0]))
    shown = [f"| {' | '.join(row)} |" for row in (lines[0], rule, *lines[1:])]
    comments = [f"<!-- {re.sub('-(?=-)', '- ', comment)} -->" for comment in _comments(table)]
    return "\n".join([*shown, "", *comments, ""])


def as_latex(table: Table) -> str:
    """Return a table in LaTeX, for the package booktabs."""
    lines = _texts(table, _escape_latex, r"\textbf{{{}}}")
    head, *rows = [f"{' & '.join(row)} \\\\" for row in lines]
    aligned = "l" * len(table.keys[0]) + "r" * (len(lines[0]) - len(table.keys[0]))
    body = [f"\\begin{{tabular}}{{{aligned}}}", "\\toprule", head, "\\midrule", *rows, "\\bottomrule", "\\end{tabular}"]
    return "\n".join([*(f"% {comment}" for comment in _comments(table)), *body, ""])


def as_data(table: Table) -> dict[str, Any]:
    """Return the table for programs: its cells, each with its keys, mean, interval and runs."""
    cells = [
        {
            "keys": dict(zip([*table.keys[0], *table.keys[1]], [*row, *column], strict=True)),
            "mean": cell.mean,
            "interval": cell.interval,
            "n": len(cell.values),
            "is_best": cell.is_best,
            "runs": [str(run.folder) for run in cell.candidate.runs],
        }
        for (row, column), cell in table.cells.items()
    ]
    return {"metric": table.metric, "cells": cells, "notes": table.notes}


def as_csv(table: Table) -> str:
    """Return a CSV line for each cell: keys, mean, interval, number of runs, whether it is the best, and its runs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [*map(csv_cell, [*table.keys[0], *table.keys[1]]), "metric", "mean", "low", "high", "n", "is_best", "runs"]
    )
    for row in table.rows:
        for column in table.columns:
            if (cell := table.cells.get((row, column))) is not None:
                bounds = cell.interval or ("", "")
                folders = " ".join(str(run.folder) for run in cell.candidate.runs)
                values = [table.metric, cell.mean, *bounds, len(cell.values), str(cell.is_best).lower(), folders]
                writer.writerow(map(csv_cell, [*row, *column, *values]))
    return text.getvalue()


def _texts(table: Table, escape: Callable[[str], str], bold: str) -> list[list[str]]:
    """Return the rows of a table as text, the head first."""
    heads = [" ".join(column) for column in table.columns]
    lines = [[escape(text) for text in (*table.keys[0], *(head or table.metric for head in heads))]]
    for row in table.rows:
        line = [escape(text) for text in row]
        for column in table.columns:
            cell = table.cells.get((row, column))
            shown = "" if cell is None else escape(cell.show())
            line.append("" if cell is None else f"{bold.format(shown) if cell.is_best else shown} ({len(cell.values)})")
        lines.append(line)
    return lines


def _comments(table: Table) -> list[str]:
    """Return the description and the notes of a table, and the runs of each cell."""
    lines = [f"{table.metric}: mean [95 % interval] (runs); bold is better than all others in its column"]
    lines += table.notes
    for cell in table.cells.values():
        lines.append(f"{cell.candidate.name}: {' '.join(str(run.folder) for run in cell.candidate.runs)}")
        if cell.candidate.missing:
            left = ", ".join(f"{count} {status}" for status, count in cell.candidate.missing.items())
            lines.append(f"{cell.candidate.name}: without {left}")
    return [printable(line) for line in lines]


def _keys(command: Command, axis: str, candidate: Candidate) -> list[str]:
    """Return the keys of rows or columns."""
    names: Sequence[str] = command.options[axis]
    for name in names:
        if all(run.saved.value(name) is None for run in candidate.runs):
            refuse_short_key(name, [run.saved for run in candidate.runs], f"--{axis}", name)
            raise WrongKey(f"--{axis}", "no run has a value of this name; must be a group or a key", repr(name))
    return [*names]


def _place(run: SavedFolder, keys: Sequence[str]) -> Place:
    return tuple(to_text(run.value(key)) for key in keys)


def _sorted(places: Iterable[Place]) -> list[Place]:
    """Return distinct values of keys in order, with numbers by size."""

    def order(place: Place) -> list[tuple[bool, float, str]]:
        numbers = [to_number(value) for value in place]
        return [(number is None, number or 0.0, text) for number, text in zip(numbers, place, strict=True)]

    return sorted({*places}, key=order)


def _escape_markdown(text: str) -> str:
    return re.sub(r"(\\|\||\](?=\())", r"\\\1", printable(text)).replace("<", "&lt;")


def _escape_latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in printable(text))
