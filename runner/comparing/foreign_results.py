"""Results that this project did not make: tables with a row for each run, and runs of any MLflow experiment.

A table is a CSV file, a file with a JSON object in each line, a list of mappings, or a pandas DataFrame. Columns that
the user does not name are recognized by their own names, or else by their values: those of a setting, such as a
learning rate, are repeated with several seeds, and those of a metric are not.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from runner.cli.verbs import TRAINING
from runner.comparing.conditions import to_number, to_text
from runner.failures.errors import WrongKey
from runner.files.whole import read_bounded
from runner.libraries.mlflow_runs import search_runs
from runner.records.listing import SavedFolder
from runner.records.result import FOLD, SEED, Result
from runner.training.metric_choice import metrics_named, short_name
from runner.training.metric_direction import sounds_like_loss

MLFLOW = "mlflow:"
LARGEST_FILE = 100_000_000  # bytes
SEEDS = ("seed", "random_seed", "random_state", "rng_seed")
NAMES = ("setting", "name", "config", "method", "model")
FOLDS = ("fold", FOLD)
DATA = ("data", "dataset", "dataset_name", "eval_data", "evaluation_data", "test_data")
LENGTHS = ("budget", "max_duration", "epochs", "num_epochs", "max_epochs", "num_train_epochs")
LENGTHS += ("steps", "max_steps", "num_steps", "iterations")


@dataclass(frozen=True)
class Columns:
    """The columns that a user named; those that are empty are guessed."""

    metric: str = ""
    seed: str = ""
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class ForeignRun(SavedFolder):
    """A run that this project did not make. Its folder is only a label, such as `results.csv:2`.

    Attributes:
        source: an id that no other run has.
        number: its position among the rows.
        columns: its values by column.
        config: the values that define its setting, and its seed.
        budget: the length of its training as text; empty if it is unknown.
        data: its evaluation data as text; empty if it is unknown.
        guess: which columns were guessed to be what, in one line; empty if all were named.
    """

    result: Result
    source: str = ""
    number: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    budget: str = ""
    data: str = ""
    guess: str = ""

    @property
    def status(self) -> str:
        """Its recorded status in lower case."""
        return self.result.status.lower()

    @cached_property
    def verb(self) -> str:
        """A verb that trains."""
        return TRAINING[0]

    @property
    def identity(self) -> object:
        """A value that no other run has."""
        return self.source

    @property
    def names(self) -> set[str]:
        """The names of its columns and metrics."""
        return {*self.columns, *self.result.metrics}

    def value(self, name: str) -> Any:
        """Return the value of a column, or a metric, or None."""
        if name in self.columns:
            return self.columns[name]
        named = metrics_named(name, self.result.metrics)
        return self.result.metrics[named[0]] if named else self.config.get(name)


@dataclass
class _Row:
    """A row of a table, or a run in MLflow, whose metrics are known."""

    place: str
    values: dict[str, Any]
    metrics: dict[str, float] | None = None
    status: str = "FINISHED"
    started: float = 0.0
    data: str = ""


def read_table(source: Any, columns: Columns, key: str) -> list[ForeignRun]:
    """Return the runs in the rows of a file, a list of mappings, or a pandas DataFrame."""
    if isinstance(source, Path):
        text = _read(source, key)
        rows = [*(_json_rows if text.lstrip().startswith("{") else _csv_rows)(source, text, key)]
        origin = str(source.resolve())
    else:
        records = source.to_dict("records") if hasattr(source, "to_dict") else source
        rows = [_Row(f"row {number}", _values(record)) for number, record in enumerate(records, 1)]
        origin = str(id(source))
    if not rows:
        raise WrongKey(key, "has no rows; must have a row for each run", repr(str(source)))
    return _to_runs(rows, origin, columns)


def read_mlflow(text: str, columns: Columns, key: str) -> list[ForeignRun]:
    """Return the runs of an MLflow experiment.

    Args:
        text: `mlflow:NAME`, perhaps with a filter in MLflow's language after a space.
        columns: the columns that the user named.
        key: the key for which the text was typed, for error messages.
    """
    match = re.fullmatch(rf"""{MLFLOW}('[^']+'|"[^"]+"|\S+)\s*(.*)""", text, re.DOTALL)
    if match is None:
        raise WrongKey(key, "must be mlflow:NAME, or mlflow:'A NAME' followed by a filter", repr(text))
    try:
        uri, runs = search_runs(match[1].strip("'\""), match[2])
    except ValueError as error:
        raise WrongKey(key, f"{error}", repr(text)) from None
    if not runs:
        raise WrongKey(key, "no run of this experiment meets the filter", repr(text))
    return _to_runs([_logged_row(run) for run in runs], f"{MLFLOW}{uri}", columns)


def _logged_row(run: Any) -> _Row:
    """Return a run of MLflow, with the last logged value of each metric."""
    facts = {name: value for name, value in run.data.tags.items() if _is_any(name, (*DATA, *LENGTHS))}
    inputs = run.inputs.dataset_inputs if run.inputs is not None else []
    contexts = [{tag.key: tag.value for tag in entry.tags}.get("mlflow.data.context", "") for entry in inputs]
    sets = {
        f"{entry.dataset.name} {entry.dataset.digest}"
        for entry, context in zip(inputs, contexts, strict=True)
        if not context.startswith("train")
    }
    metrics = {short_name(name): value for name, value in run.data.metrics.items() if not name.startswith("system/")}
    started = (run.info.start_time or 0) / 1000
    values = _values(facts | run.data.params)
    return _Row(f"{MLFLOW}{run.info.run_id}", values, metrics, run.info.status, started, ", ".join(sorted(sets)))


@dataclass
class _Roles:
    """The roles of columns: `chosen` name a run's setting, and `plain` are not metrics."""

    seed: str
    settings: list[str]
    chosen: list[str]
    folds: list[str]
    measured: list[str]
    plain: list[str]


def _find_roles(rows: Sequence[_Row], columns: Columns) -> _Roles:
    """Return the roles of the columns, as the user named them or else guessed."""
    names = [*dict.fromkeys(name for row in rows for name in row.values)]
    cells = {name: [row.values.get(name) for row in rows] for name in names}
    distinct = {name: len({*map(to_text, values)}) for name, values in cells.items()}
    seed = columns.seed or _first(SEEDS, names) or SEED
    for option, name in (("seed", seed), *(("setting", name) for name in columns.settings)):
        if name not in names:
            raise WrongKey(f"--{option}-column", f"no such column; the columns are {', '.join(names)}", repr(name))
    described = [name for name in names if name != seed and name not in columns.settings]
    measured: list[str] = []
    if rows[0].metrics is None:
        requested = metrics_named(columns.metric, described) if columns.metric else ()
        known = (*NAMES, *FOLDS, *DATA, *LENGTHS)
        numeric = [name for name in described if _is_numeric(cells[name]) and not _is_any(name, known)]
        # In a column of a metric, some value occurs only once.
        single = [name for name in numeric if len(numeric) == 1 or 1 in Counter(map(to_text, cells[name])).values()]
        measured = [name for name in described if name in requested or name in single]
    plain = [name for name in described if name not in measured]
    folds = [name for name in plain if _is_any(name, FOLDS)][:1]
    # Text that differs in all rows, such as a path, is not a setting.
    repeated = [name for name in plain if distinct[name] < max(len(rows), 2) and name not in folds]
    varying = [name for name in repeated if distinct[name] > 1]
    named = _first(NAMES, varying)
    chosen = [*columns.settings] or ([named] if named else varying)
    return _Roles(seed, [*columns.settings] or repeated, chosen, folds, measured, [*columns.settings, *plain])


def _to_runs(rows: Sequence[_Row], origin: str, columns: Columns) -> list[ForeignRun]:
    """Return rows as runs."""
    roles = _find_roles(rows, columns)
    by_row = [_metrics(row, roles.measured) for row in rows]
    metrics = [*dict.fromkeys(name for values in by_row for name in values)]
    objective = metrics[0] if len(metrics) == 1 else ""
    guesses = [f"the seed is {roles.seed}"] * (not columns.seed)
    guesses += [f"the setting is {', '.join(roles.chosen)}"] * bool(roles.chosen and not columns.settings)
    guesses += [f"the metric is {objective}"] * bool(objective and not columns.metric)
    runs = []
    for number, (row, values) in enumerate(zip(rows, by_row, strict=True)):
        if (seed := row.values.get(roles.seed)) is None:
            raise WrongKey("--seed-column", f"{row.place} has no seed", repr(roles.seed))
        data = row.data or _fact(row, roles.plain, DATA)
        result = Result(
            status=row.status,
            name=row.place,
            identity="",
            overrides=[],
            objective=values.get(objective),
            objective_name=objective,
            metrics=values,
            choices={name: to_text(row.values.get(name)) for name in roles.chosen},
            evaluation={f"{name.partition('/')[0]}:data": data for name in values},
            lower=[name for name in values if sounds_like_loss(name)],
            started=row.started,
        )
        config = {SEED: seed, **{name: row.values.get(name) for name in roles.settings}}
        config |= dict.fromkeys([FOLD] * len(roles.folds), row.values.get("".join(roles.folds)))
        facts = (row.values, config, _fact(row, roles.plain, LENGTHS), data, ", ".join(guesses))
        runs.append(ForeignRun(Path(row.place), result, f"{origin}:{row.place}", number, *facts))
    return runs


def _metrics(row: _Row, measured: Iterable[str]) -> dict[str, float]:
    """Return the metrics of a row: those of MLflow, or the numbers in its measured columns."""
    if row.metrics is not None:
        return row.metrics
    numbers = {name: to_number(row.values.get(name)) for name in measured}
    return {name: number for name, number in numbers.items() if number is not None}


def _is_numeric(cells: Sequence[Any]) -> bool:
    """Return whether most cells of a column are numbers."""
    return 2 * sum(to_number(cell) is not None for cell in cells) > len(cells)


def _fact(row: _Row, names: Iterable[str], known: Sequence[str]) -> str:
    """Return the columns of a row with known names as text, without those that are empty."""
    facts = {name: row.values.get(name) for name in names if _is_any(name, known)}
    return ", ".join(f"{name}={to_text(value)}" for name, value in facts.items() if value is not None)


def _is_any(name: str, known: Sequence[str]) -> bool:
    """Return whether a name, or its last part, is a known one."""
    return name.lower() in known or re.split("[./]", name.lower())[-1] in known


def _first(known: Sequence[str], names: Sequence[str]) -> str:
    """Return the name that comes first among known ones, a full name before one with dots; empty without any."""
    matches = [name for word in known for name in names if _is_any(name, (word,))]
    return next((name for name in matches if name.lower() in known), next(iter(matches), ""))


def _read(path: Path, key: str) -> str:
    try:
        return read_bounded(path, LARGEST_FILE).decode("utf-8-sig")
    except ValueError as error:
        reason = "must be text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"{error}"
        raise WrongKey(key, reason, repr(str(path))) from None


def _json_rows(path: Path, text: str, key: str) -> Iterable[_Row]:
    """Yield the JSON objects in the lines of a text."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            content = json.loads(line or "{}")
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, Mapping):
            raise WrongKey(key, f"line {number} is not a JSON object", repr(str(path)))
        if content:
            yield _Row(f"{path}:{number}", _values(content))


def _csv_rows(path: Path, text: str, key: str) -> Iterable[_Row]:
    """Yield the rows of CSV text whose first line names the columns."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise WrongKey(key, f"two columns have the name {twice[0]!r}", repr(str(path)))
        for cells in reader:
            if cells and len(cells) != len(names):
                reason = f"line {reader.line_num} has {len(cells)} cells instead of {len(names)}"
                raise WrongKey(key, reason, repr(str(path)))
            if cells:
                yield _Row(f"{path}:{reader.line_num}", _values(dict(zip(names, cells, strict=True))))
    except csv.Error as error:
        raise WrongKey(key, f"line {reader.line_num}: {error}", repr(str(path))) from None


def _values(cells: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(name): _value(cell) for name, cell in cells.items()}


def _value(cell: Any) -> Any:
    """Return a cell as a number if it is one; None if it is empty or NaN. Whole numbers are integers, as seeds are."""
    cell = cell.item() if hasattr(cell, "item") else cell  # a NumPy scalar
    if isinstance(cell, str):
        cell = cell.strip()
        if re.fullmatch(r"[+-]?\d{1,300}", cell):
            return int(cell)
        try:
            cell = cell if "_" in cell else float(cell)
        except ValueError:
            return cell or None
    if isinstance(cell, float):
        return None if math.isnan(cell) else int(cell) if cell.is_integer() and abs(cell) < 2**53 else cell
    return cell
