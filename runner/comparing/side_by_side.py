"""Several runs in one table: outcomes, metrics, and the differences of their configs and environments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.comparing.changes import find_changes
from runner.comparing.conditions import to_text
from runner.files.addresses import hidden_everywhere
from runner.files.names import CODE, PATCH, RESULT
from runner.files.printable import printable
from runner.records.environment import affecting
from runner.records.listing import SavedFolder
from runner.records.record import Record
from runner.records.result import Result, read_result
from runner.terminal.text import heading, shortened, show_seconds, table_width

LABEL = 36  # characters of a row's name
NARROW = 8  # least characters of a run's column
WIDE = 24  # most characters of a run's column
DIGITS = 8  # of a digest

Row = tuple[str, list[str]]


def side_by_side(folders: Sequence[Path]) -> list[str]:
    """Return the lines of tables in which each run has a column; a wide table is divided into several."""
    configs = [hidden_everywhere(Record(folder).config_if_readable) for folder in folders]
    sections = {
        "": [*_outcomes(folders)],
        "Config": [*_choices(folders), *_differences(configs)],
        "Environment": [*_surroundings(folders)],
    }
    rows = [row for section in sections.values() for row in section]
    names = [printable(name) for name in short_names(folders)]
    label = min(max(len(name) for name, _ in rows), LABEL)
    lengths = [len(cell) for _, cells in [("", names), *rows] for cell in cells]
    width = max(NARROW, min(WIDE, max(lengths)))
    columns = max(1, (table_width() - label) // (width + 2))
    lines: list[str] = []
    for start in range(0, len(folders), columns):
        part = slice(start, start + columns)
        lines += [""] * bool(lines)
        lines.append(heading(_line("", names[part], label, width)))
        for title, section in sections.items():
            lines += ["", heading(f"{title}, where it differs")] if title and section else []
            lines += [_line(name, cells[part], label, width) for name, cells in section]
    return lines


def describe_bases(results: Iterable[Result | None]) -> str | None:
    """Return a sentence if runs trained adapters on different bases; None if not."""
    bases = sorted({result.base[:DIGITS] for result in results if result is not None and result.base})
    text = "these runs trained adapters on different bases, so their metrics also measure the base"
    return printable(f"{text} ({', '.join(bases)})") if len(bases) > 1 else None


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the ends of paths, as short as possible but distinct."""
    names = [str(folder) for folder in folders]
    for count in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len({*names}) == len({*folders}):
            break
    return names


def _outcomes(folders: Sequence[Path]) -> Iterator[Row]:
    """Yield status, training time and all metrics of the runs."""
    results = [read_result(folder) for folder in folders]
    runs = [SavedFolder(*pair) for pair in zip(folders, results, strict=True)]
    yield "status", [printable(run.status) if (run.folder / RESULT).exists() else "-" for run in runs]
    yield "time", ["-" if result is None or not result.seconds else show_seconds(result.seconds) for result in results]
    loads = [{} if result is None else result.load for result in results]
    if any("others" in load for load in loads):
        yield "other work on the machine", [f"{load['others']:.0%}" if "others" in load else "-" for load in loads]
    for name in ("base", "adapter"):
        digests = ["" if result is None else getattr(result, name) for result in results]
        if any(digests):
            yield name, [printable(digest[:DIGITS]) or "-" for digest in digests]
    names = dict.fromkeys(name for result in results if result is not None for name in result.metrics)
    for name in sorted(names, key=lambda name: name.startswith("train/")):
        values = [None if result is None else result.metrics.get(name) for result in results]
        yield printable(name), ["-" if value is None else f"{value:.6g}" for value in values]


def _choices(folders: Sequence[Path]) -> Iterator[Row]:
    """Yield the config groups in which the runs made different choices."""
    results = [read_result(folder) for folder in folders]
    yield from _differences([{} if result is None else result.choices for result in results])


def _surroundings(folders: Sequence[Path]) -> Iterator[Row]:
    """Yield differences in the machines and the code of the runs."""
    records = [Record(folder) for folder in folders]
    yield from _differences([affecting(record.environment) for record in records])
    patches = [record.patch for record in records]
    if any(patch != patches[0] for patch in patches):
        counts = [len(patch.splitlines()) for patch in patches]
        yield PATCH, [f"{count:,} line{'s' * (count > 1)}" if count else "none" for count in counts]
    codes = [record.code for record in records]
    if any(modules != codes[0] for modules in codes):
        yield f"{CODE}/", [f"{len(code)} file{'s' * (len(code) > 1)}" if code else "none" for code in codes]


def _differences(records: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the keys whose values differ between records, with the values. Empty records are unknown."""
    known = [record for record in records if record]
    keys = dict.fromkeys(change.key for record in known[1:] for change in find_changes(known[0], record))
    for key in keys:
        yield printable(key), [_value(record, key.split(".")) for record in records]


def _value(record: Any, parts: Sequence[str]) -> str:
    for part in parts:
        if not isinstance(record, Mapping) or part not in record:
            return "-"
        record = record[part]
    text = to_text(record)
    is_section = isinstance(record, Mapping) and "_target_" in record
    return printable(text.rpartition(".")[2] if is_section else text)


def _line(label: str, cells: Sequence[str], size: int, width: int) -> str:
    shown = [f"{shortened(cell, width):<{width}}" for cell in cells]
    return "  ".join([f"{shortened(label, size):<{size}}", *shown]).rstrip()
