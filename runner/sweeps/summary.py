"""The summary of a sweep: a table on the terminal and in files, a plot, and a summary for destinations."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.addresses import without_credentials
from runner.destination import SweepSummary
from runner.files.whole import write_whole
from runner.runs.result import Result
from runner.sweeps import sweep
from runner.sweeps.job import own_overrides, show_value, swept_values
from runner.sweeps.plan import name_job_in, short_names
from runner.sweeps.sweep import Sweep
from runner.terminal import make_console, print_block, show_path

log = logging.getLogger("runner")

SHOWN = 25  # jobs in the table on the terminal
SHOWN_METRICS = 3  # besides the objective
Table = tuple[list[str], list[list[Any]]]


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep, for comparison.

    Attributes:
        result: its result.
        values: the swept values of this job, by key.
        loss: the lower, the better; infinite if the job has no objective.
    """

    result: Result
    values: dict[str, Any]
    loss: float


def end_sweep() -> int:
    """Summarize the sweep that this process led, and return the exit code; 0 if it led none."""
    led = sweep.led
    sweep.led = None
    if led is None:
        return 0
    results = led.results()
    led.clear_notes()
    refused = [one for one in results if one.status == "REFUSED"]
    jobs = compare([one for one in results if one.status != "REFUSED"], led)
    for job in jobs:
        if job.result.status == "FAILED" and not led.shares_terminal:
            print(f"{job.result.name}: {job.result.error}", file=sys.stderr)
    try:
        if jobs:
            _summarize(led, jobs, len(refused))
    except OSError as error:
        log.warning("the summary of the sweep was not written: %s", error)
    for message in dict.fromkeys(one.error or "" for one in refused):
        first, *others = (one for one in refused if one.error == message)
        own = own_overrides(first.overrides, led.fixed)
        print(f"error: {without_credentials(name_job_in(message, first.wrong_key, own, len(others)))}", file=sys.stderr)
    statuses = {one.status for one in results}
    for number, handler in led.handlers.items():
        signal.signal(number, handler)
    if led.stopped_by:
        return 128 + led.stopped_by
    return 2 if "REFUSED" in statuses else int(not statuses.isdisjoint(("FAILED", "KILLED")))


def compare(results: Sequence[Result], led: Sweep) -> list[SweepJob]:
    """Return the jobs that results belong to, best first."""
    jobs = []
    for result in results:
        lower = led.direction == "minimize" if led.direction else result.lower_is_better
        value = result.objective
        known = value is not None and not math.isnan(value) and result.status == "FINISHED"
        loss = (value if lower else -value) if known and value is not None else math.inf
        jobs.append(SweepJob(result, swept_values(result.overrides, led.fixed), loss))
    return sorted(jobs, key=lambda job: (job.loss, job.result.name))


def tabulate(jobs: Sequence[SweepJob], most: int | None = None) -> Table:
    """Return columns and rows: for each job its swept values, its metrics, its time in seconds and its status.

    Args:
        jobs: the jobs, best first.
        most: number of metrics to include, those of evaluators first; None includes all.
    """
    keys = _keys(jobs)
    shorts = short_names(keys)
    objective = objective_name(jobs)
    metrics = dict.fromkeys([objective] if objective else [])
    metrics |= dict.fromkeys(sorted((name for job in jobs for name in job.result.metrics), key=_is_of_training))
    metrics = [*metrics][:most]
    columns = ["job", *shorts.values(), *metrics, "seconds", "status"]
    rows = [
        [
            job.result.name,
            *(_cell(job.values.get(key)) for key in keys),
            *(job.result.metrics.get(name) for name in metrics),
            round(job.result.seconds, 2),
            job.result.status,
        ]
        for job in jobs
    ]
    return columns, rows


def average(jobs: Sequence[SweepJob]) -> Table | None:
    """Return mean and sample standard deviation of the objective over seeds; None if no jobs differ only in seed."""
    keys = [key for key in _keys(jobs) if key != "seed"]
    groups: dict[str, list[SweepJob]] = {}
    for job in jobs:
        if math.isfinite(job.loss):
            groups.setdefault(json.dumps([_cell(job.values.get(key)) for key in keys]), []).append(job)
    if not any("seed" in job.values for job in jobs) or all(len(group) < 2 for group in groups.values()):
        return None
    rows = []
    for group in sorted(groups.values(), key=lambda group: statistics.fmean(job.loss for job in group)):
        objectives = [job.result.objective or 0.0 for job in group]
        spread = statistics.stdev(objectives) if len(group) > 1 else None
        values = [_cell(group[0].values.get(key)) for key in keys]
        rows.append([*values, statistics.fmean(objectives), spread, len(group)])
    return [*short_names(keys).values(), f"mean {objective_name(jobs)}", "spread", "seeds"], rows


def objective_name(jobs: Sequence[SweepJob]) -> str:
    """Return the metric that jobs are compared by; empty if no job has one."""
    return next((job.result.objective_name for job in jobs if job.result.objective_name), "")


def _is_of_training(name: str) -> bool:
    return name.startswith("train/")


def _keys(jobs: Sequence[SweepJob]) -> list[str]:
    return sorted({key for job in jobs for key in job.values})


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str) and not isinstance(value, bool) else show_value(value)


def _summarize(led: Sweep, jobs: list[SweepJob], refused: int) -> None:
    """Print the table, write it to the sweep's folder, and pass it to destinations.

    Args:
        led: the sweep.
        jobs: the jobs, best first.
        refused: number of jobs that could not start, and left nothing behind.
    """
    from runner.sweeps.plot import draw

    if led.direction and any(job.result.lower_is_better != (led.direction == "minimize") for job in jobs):
        log.warning("hydra.sweeper.direction=%s is the wrong direction for %s", led.direction, objective_name(jobs))
    table = tabulate(jobs)
    means = average(jobs)
    tables = {"jobs": table} | ({"means": means} if means is not None else {})
    files = [led.folder / "jobs.csv", led.folder / "jobs.json", led.folder / "comparison.png"]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([table[0], *table[1]])
    write_whole(files[0], text.getvalue())
    rows = [dict(zip(table[0], row, strict=True)) for row in table[1]]
    write_whole(files[1], json.dumps({"sweep": led.id, "name": led.name, "jobs": rows}, indent=1))
    if math.isfinite(jobs[0].loss):
        draw(jobs, objective_name(jobs), files[2])
    summary = SweepSummary(
        folder=led.folder,
        sweep=led.id,
        name=led.name,
        status=_status(led, jobs),
        tables=tables,
        best=_describe_best(jobs),
        metrics=_metrics(jobs),
        files=[file for file in files if file.exists()],
    )
    for destination in led.destinations:
        destination.log_sweep(summary)
    _print(led, jobs, refused, tables, summary)


def _status(led: Sweep, jobs: Sequence[SweepJob]) -> str:
    statuses = {job.result.status for job in jobs}
    if led.stopped_by or "KILLED" in statuses:
        return "KILLED"
    return "FAILED" if "FAILED" in statuses else "FINISHED"


def _describe_best(jobs: Sequence[SweepJob]) -> dict[str, str]:
    if not math.isfinite(jobs[0].loss):
        return {}
    best = jobs[0]
    return {"job": best.result.name, **{key: show_value(value) for key, value in best.values.items()}}


def _metrics(jobs: Sequence[SweepJob]) -> dict[str, float]:
    metrics = {"sweep/jobs": float(len(jobs))}
    metrics["sweep/finished"] = float(sum(job.result.status == "FINISHED" for job in jobs))
    if math.isfinite(jobs[0].loss) and jobs[0].result.objective is not None:
        metrics[f"best/{objective_name(jobs)}"] = jobs[0].result.objective
    return metrics


def _print(led: Sweep, jobs: Sequence[SweepJob], refused: int, tables: dict[str, Table], summary: SweepSummary) -> None:
    """Print the sweep's name, its tables, and where they are stored."""
    from rich.text import Text

    console = make_console(200)
    statuses = Counter(job.result.status.lower() for job in jobs) + Counter(refused=refused)
    counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
    console.print(Text(f"\n{led.name}: {counts}", "bold"))
    _print_table(console, *tabulate(jobs[:SHOWN], SHOWN_METRICS))
    if len(jobs) > SHOWN:
        console.print(f"and {len(jobs) - SHOWN} more, in {show_path(led.folder / 'jobs.csv')}")
    if "means" in tables:
        console.print()
        _print_table(console, *tables["means"])
    lines = [("best", summary.best["job"])] if summary.best else []
    lines.append(("sweep", show_path(led.folder)))
    commands = (getattr(one, "ui_command", None) for one in led.destinations)
    lines += [("compare", command) for command in commands if command]
    console.print()
    print_block("", lines)


def _print_table(console: Any, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.table import Table as Grid

    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*("-" if value is None else show_value(value) for value in row))
    console.print(grid)
