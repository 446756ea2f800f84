"""`runner runs 'eval/loss<0.2' model=resnet8`: lists the runs in `outputs/`, filtered and sorted.

A condition is a name, one of = != < <= > >=, and a value; all of them must hold. The name is a field (status, name,
folder, verb, started, seconds, objective), a metric (eval/loss), a config group (model=resnet8) or a key of the config
(optimizer.lr>0.01). With = and !=, text may be a pattern, such as name=resnet*. `--sort` takes any such name, with - in
front of it for the largest first; without it, the latest run comes first.
"""

from __future__ import annotations

import csv
import datetime
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.cli.command import Command
from runner.comparing.conditions import Condition, choose, in_order, parse_conditions, to_number, to_text
from runner.failures.errors import WrongKey
from runner.files.printable import csv_cell, printable
from runner.records.listing import FIELDS, OUTPUTS, SavedFolder, find_runs
from runner.records.result import to_json
from runner.terminal.answer import set_fields
from runner.terminal.text import Column, draw_table, shortened, show_seconds, table_width

LIMIT = 25  # runs in a table
TYPED = 24  # characters reserved for the typed overrides, if they need them
MOST = 40  # characters of a value
LOSSES = ("eval/loss",)  # shown in addition to the objective
HEAD = 14  # characters in a line of a column's head, if its name can be split


def run(command: Command) -> None:
    """Print the runs in `outputs/` that meet the conditions, as a table, or as CSV with everything known about them."""
    conditions = parse_conditions(" ".join(command.words))
    order = command.options["sort"]
    form = command.options["format"]
    limit = command.options["limit"]
    if limit is None:
        limit = LIMIT if form == "table" else 0
    if limit < 0:
        raise WrongKey("--limit", "must be a number of runs, or 0 for all", repr(limit))
    all_runs = [*find_runs(Path(OUTPUTS))]
    runs = in_order(choose(all_runs, conditions), order)
    depths = [0] * len(runs)
    if not order and form == "table":
        runs, depths = as_tree(runs)
    shown = runs[: limit or None]
    set_fields(result={"runs": [describe(run) for run in shown], "matching": len(runs), "all": len(all_runs)})
    if form == "table":
        print("\n".join(_table(runs, depths, conditions, order, limit, len(all_runs))))
    else:
        _write_csv(shown)


def describe(run: SavedFolder) -> dict[str, Any]:
    """Return everything known about a run in plain containers, with NaN and infinities as text."""
    result = run.result
    known: dict[str, Any] = {
        "folder": str(run.folder),
        "status": run.status,
        "verb": run.value("verb"),
        "started": _time(run.started),
    }
    if result is None:
        return known
    return {
        **known,
        "name": result.name,
        "seconds": to_json(result.seconds),
        "objective": to_json(result.objective),
        "objective_name": result.objective_name,
        "metrics": {name: to_json(value) for name, value in result.metrics.items()},
        "choices": result.choices,
        "overrides": result.overrides,
        **({"parent": result.parent, "forked_at": result.forked_at} if result.parent else {}),
    }


def as_tree(runs: Sequence[SavedFolder]) -> tuple[list[SavedFolder], list[int]]:
    """Return runs ordered as a tree, each fork below its parent, and the depth of each run."""
    known = {run.folder.resolve(): run for run in runs}
    children: dict[Path | None, list[SavedFolder]] = {}
    for run in runs:
        parent = Path(run.result.parent).resolve() if run.result is not None and run.result.parent else None
        own = run.folder.resolve()
        children.setdefault(parent if parent in known and parent != own else None, []).append(run)
    ordered: list[SavedFolder] = []
    depths: list[int] = []
    added: set[Path] = set()

    def add(run: SavedFolder, depth: int) -> None:
        if run.folder in added:
            return
        added.add(run.folder)
        ordered.append(run)
        depths.append(depth)
        for child in children.pop(run.folder.resolve(), ()):
            add(child, depth + 1)

    for run in children.pop(None, []):
        add(run, 0)
    for orphan in [run for listed in children.values() for run in listed]:  # edited files may form a cycle
        add(orphan, 0)
    return ordered, depths


def _branch(run: SavedFolder, depth: int) -> str:
    """Return the prefix of a fork in the table: its depth, and the batch where it begins."""
    return f"{'  ' * (depth - 1)}└ ba{run.result.forked_at} " if depth and run.result is not None else ""


def _table(
    runs: Sequence[SavedFolder],
    depths: Sequence[int],
    conditions: Sequence[Condition],
    order: str,
    limit: int,
    all_runs: int,
) -> list[str]:
    """Return the lines of a table of the first `limit` runs, or of all if it is 0, under a title about all of them.

    The table fits the terminal: the least important columns are left out first.
    """
    matching = len(runs)
    counts = f"{matching:,} of {all_runs:,} runs" if matching != all_runs else f"{all_runs:,} runs"
    title = f"{counts.removesuffix('s') if counts == '1 runs' else counts} in {OUTPUTS}/"
    if not runs:
        return [title]
    statuses = {run.status for run in runs}
    if len(statuses) == 1:  # a shared status needs no column
        title += f", {'all ' * (matching > 1)}{printable(*statuses)}"
    runs = runs[: limit or None]
    typed = _what_differs(runs)
    widest = max(map(len, typed))
    folders = _folders(runs, table_width())
    named = [_branch(run, depth) + folder for run, depth, folder in zip(runs, depths, folders, strict=False)]
    chosen = [Column(["run"], named)]
    room = table_width() - chosen[0].width
    left_out = []
    for column, is_important in _by_importance(runs, conditions, order, len(statuses) > 1):
        reserved = 0 if is_important or not widest else min(widest, TYPED) + 2
        if column.width + 2 + reserved <= room:
            chosen.append(column)
            room -= column.width + 2
        else:
            left_out.append("".join(column.head))
    if widest and room - 2 >= min(widest, TYPED):
        chosen.append(Column(["typed"], [shortened(text, room - 2) for text in typed]))
    elif widest:
        left_out.append("typed")
    lines = [title, *draw_table(chosen)]
    if left_out:
        lines.append(f"no room for {', '.join(left_out)}; --format csv shows all")
    if len(runs) < matching:
        lines.append(f"and {matching - len(runs):,} more; --limit 0 shows all")
    return lines


def _folders(runs: Sequence[SavedFolder], width: int) -> list[str]:
    """Return the folders of runs as text; on a narrow terminal, without `outputs/` and the start of long ones."""
    texts = [printable(run.folder) for run in runs]
    if max(map(len, texts)) > width // 3:
        texts = [text.removeprefix(f"{OUTPUTS}/") for text in texts]
    most = width // 2
    return [text if len(text) <= most else f"…{text[1 - most :]}" for text in texts]


def _by_importance(
    runs: Sequence[SavedFolder], conditions: Sequence[Condition], order: str, has_status: bool
) -> Iterator[tuple[Column, bool]]:
    """Yield columns, most important first, and whether each is more important than the typed overrides."""
    if has_status:
        yield Column(["status"], [printable(shortened(run.status, 12)) for run in runs]), True
    fixed = [
        condition.name for condition in conditions if condition.sign == "="
    ]  # their values are the same in all runs
    named = [condition.name for condition in conditions if condition.name not in fixed]
    named += [order.removeprefix("-")] * bool(order)
    objectives = _objectives(runs)
    shown = []
    for name in dict.fromkeys([*named, *objectives, *LOSSES]):
        column = None if name in FIELDS else _column(name, runs)
        if column is not None and (column.head[-1], column.cells) not in shown:  # a short name may repeat a column
            shown.append((column.head[-1], column.cells))
            yield column, name in (*named, *objectives[:1])
    yield Column(["time"], [_seconds(run) for run in runs], True), False


def _column(name: str, runs: Sequence[SavedFolder]) -> Column | None:
    """Return the column of a value, or None if no run has it."""
    values = [run.value(name) for run in runs]
    if all(value is None for value in values):
        return None
    is_number = all(value is None or to_number(value) is not None for value in values)
    return Column(
        _head(name), ["-" if value is None else printable(shortened(_cell(value), MOST)) for value in values], is_number
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else to_text(value)


def _head(name: str) -> list[str]:
    """Split a column's name into lines about as narrow as its values, such as `eval/`, `Multiclass`, `Accuracy`."""
    lines = [""]
    for part in re.findall(r"[^/A-Z]*/|[A-Z]?[^/A-Z]+|[A-Z]", printable(name)):
        if lines[-1] and len(lines[-1] + part) > HEAD:
            lines.append("")
        lines[-1] += part
    return [shortened(line, 2 * HEAD) for line in lines]


def _objectives(runs: Sequence[SavedFolder]) -> list[str]:
    """Return the objectives of these runs, most frequent first."""
    counts = Counter(run.result.objective_name for run in runs if run.result is not None)
    return [name for name, _ in counts.most_common() if name]


def _what_differs(runs: Sequence[SavedFolder]) -> list[str]:
    """Return for each run the overrides that the runs do not all share, with keys cut to their last part."""
    typed = [*map(_typed, runs)]
    shared = set(typed[0]).intersection(*typed) if len(runs) > 1 else set()
    texts = []
    for overrides in typed:
        parts = (override.partition("=") for override in overrides if override not in shared)
        texts.append(printable(" ".join(f"{_short(key)}{sign}{value}" for key, sign, value in parts)))
    return texts


def _typed(run: SavedFolder) -> list[str]:
    """Return the overrides of a run, and for a loop that `runner.Recorder` recorded the values of its config."""
    if run.result is not None and not run.result.overrides and run.is_own_loop:
        from runner.comparing.candidates import flatten  # imports numpy

        return [f"{key}={to_text(value)}" for key, value in flatten(run).items()]
    return [] if run.result is None else run.result.overrides


def _short(key: str) -> str:
    """Return the last part of a key, with `~` if the key was removed."""
    return ("~" if key.startswith("~") else "") + key.rpartition(".")[2].removeprefix("~")


def _seconds(run: SavedFolder) -> str:
    """Return the training time of a run, over the sessions that ended."""
    return show_seconds(run.result.seconds) if run.result is not None and run.result.seconds else "-"


def _write_csv(runs: Sequence[SavedFolder]) -> None:
    """Print a line for each run, with columns for all fields, metrics and config groups of these runs."""
    described = [describe(run) for run in runs]
    nested = {"metrics": dict.fromkeys(key for row in described for key in row.get("metrics", ()))}
    nested["choices"] = dict.fromkeys(key for row in described for key in row.get("choices", ()))
    plain = ["folder", "status", "verb", "started", "name", "seconds", "objective", "objective_name"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(csv_cell, [*plain, *nested["metrics"], *nested["choices"], "overrides"]))
    for row in described:
        cells = [row.get(name) for name in plain]
        for group, keys in nested.items():
            cells += [row.get(group, {}).get(key) for key in keys]
        cells.append(" ".join(row.get("overrides", ())))
        writer.writerow("" if cell is None else csv_cell(cell) for cell in cells)


def _time(seconds: float) -> str:
    """Return a time as ISO text in UTC; empty if it is out of range."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""
