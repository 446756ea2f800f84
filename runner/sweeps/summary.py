"""The end of a sweep: tables and a report in its folder, a summary for destinations, and its final output."""

from __future__ import annotations

import csv
import io
import json
import logging
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from runner.core.destination import SweepSummary
from runner.failures.exit_codes import DONE, ENVIRONMENT_FAILED, FAILED, NAMES, WRONG_CONFIG
from runner.files.addresses import without_credentials
from runner.files.printable import csv_cell
from runner.files.whole import write_atomically
from runner.records.folder import LOG
from runner.records.load import describe_inequality
from runner.records.result import FOLD, SEED, Result
from runner.records.sweep_jobs import left_out
from runner.sweeps import sweep as sweeps
from runner.sweeps.analysis import Analysis
from runner.sweeps.ladder.rungs import make_ladder
from runner.sweeps.names import own_overrides, show_value
from runner.sweeps.objectives import find_front, several_objectives
from runner.sweeps.plan import name_job_in
from runner.sweeps.settings import (
    Setting,
    SweepJob,
    describe_ties,
    group_jobs,
    list_first,
    lower_is_better,
    metrics_of,
    objective_name,
    rank_jobs,
    tabulate_jobs,
    tabulate_settings,
    without_empty,
)
from runner.sweeps.sweep import Sweep
from runner.terminal.answer import set_fields
from runner.terminal.console import make_console, print_block, show_path
from runner.terminal.text import Column, draw_table, print_to_stderr

log = logging.getLogger("runner")

SHOWN = 25  # settings in the table on the terminal
SHOWN_METRICS = 3  # besides the objective, if they fit


def end_sweep() -> int:
    """Summarize the sweep of this process, and return the exit code; 0 if there is none."""
    sweep = sweeps.current
    sweeps.current = None
    if sweep is None:
        return 0
    if sweep.progress is not None:
        sweep.progress.stop()
    results = sweep.results()
    sweep.clear_notes()
    refused = [result for result in results if result.status == "REFUSED"]
    jobs = rank_jobs([result for result in results if result.status != "REFUSED"], sweep)
    settings = group_jobs(jobs) if jobs else []
    analysis = _analyze(sweep, jobs, settings) if jobs else None
    try:
        if jobs:
            _summarize(sweep, jobs, settings, analysis, len(refused))
    except OSError as error:
        log.warning("the summary of the sweep was not written: %s", error)
    _print_errors(sweep, jobs, refused)
    statuses = {result.status for result in results}
    if results:
        ranked = [result.as_json() for result in [*(job.result for job in jobs), *refused]]
        set_fields(result={"folder": str(sweep.folder), **_as_json(sweep, settings, analysis), "jobs": ranked})
    for number, handler in sweep.handlers.items():
        signal.signal(number, handler)
    if sweep.stopped_by:
        return 128 + sweep.stopped_by
    errors = [result.error or {} for result in results if result.status in ("FAILED", "REFUSED")]
    if errors:
        set_fields(error=errors[0])
    if "REFUSED" in statuses:
        return WRONG_CONFIG
    if errors and all(error.get("code") == NAMES[ENVIRONMENT_FAILED] for error in errors):
        return ENVIRONMENT_FAILED
    return FAILED if not statuses.isdisjoint(("FAILED", "KILLED")) else DONE


def _analyze(sweep: Sweep, jobs: Sequence[SweepJob], settings: Sequence[Setting]) -> Analysis | None:
    """Return what a ladder or a decision has found out; None for other sweeps."""
    if sweep.is_ladder:
        from runner.sweeps.ladder.plot import draw_ladder

        ladder = make_ladder(settings, lower_is_better(jobs, sweep))
        draw = partial(draw_ladder, ladder)
        return Analysis("ladder", ladder.lines(), ladder.tabulate(), ladder.metrics(), ladder.as_json(), draw)
    if sweep.contest is None:
        return None
    from runner.sweeps.decide.outcome import Outcome

    outcome = Outcome(sweep.contest.look(sweep.results_of_contest()))
    outcome.settle()
    table = outcome.tabulate()
    return Analysis("decision", outcome.lines(), table, outcome.metrics(), outcome.as_json(), outcome.draw)


def _print_errors(sweep: Sweep, jobs: Sequence[SweepJob], refused: Sequence[Result]) -> None:
    """Print each error once, with the jobs that it ended."""
    by_error: dict[tuple[str, str], list[Result]] = {}
    for job in jobs:
        if job.result.status in ("FAILED", "DIVERGED"):
            by_error.setdefault((job.result.status, job.result.message), []).append(job.result)
    for (status, _), (first, *further) in by_error.items():
        more = f" and {len(further)} more" if further else ""
        where = show_path(sweep.folder / first.name / LOG)
        print_to_stderr(f"{first.name}{more}: {status}, see {where}\n{(first.trace or first.message).rstrip()}")
    for message in dict.fromkeys(result.message for result in refused):
        first, *further = (result for result in refused if result.message == message)
        own = own_overrides(first.overrides, sweep.fixed)
        print_to_stderr(f"error: {without_credentials(name_job_in(message, first.wrong_key, own, len(further)))}")


def _summarize(
    sweep: Sweep, jobs: list[SweepJob], settings: Sequence[Setting], analysis: Analysis | None, refused: int
) -> None:
    """Write the tables and the report to the sweep's folder, pass them to destinations, and print the settings.

    `refused` is the number of jobs that could not start.
    """
    known = [job.result for job in jobs if job.result.objective_name]
    if sweep.direction and any(result.lower_is_better != (sweep.direction == "minimize") for result in known):
        log.warning("hydra.sweeper.direction=%s is the wrong direction for %s", sweep.direction, objective_name(jobs))
    tables = {"settings": tabulate_settings(settings, metrics_of(jobs)), "jobs": tabulate_jobs(jobs)}
    if analysis is not None:
        tables = {analysis.name: analysis.table, **tables}
    files = []
    for name, (columns, rows) in tables.items():
        text = io.StringIO(newline="")
        csv.writer(text).writerows(map(csv_cell, row) for row in [columns, *rows])
        files.append(sweep.folder / f"{name}.csv")
        write_atomically(files[-1], text.getvalue())
    files.append(sweep.folder / "results.json")
    write_atomically(files[-1], json.dumps(_as_json(sweep, settings, analysis), indent=1))
    if settings[0].objectives:
        from runner.sweeps.report import write_report

        files += write_report(sweep, settings, tables, analysis, _ui_commands(sweep))
    summary = SweepSummary(
        folder=sweep.folder,
        sweep=sweep.id,
        name=sweep.name,
        status=_status(sweep, jobs),
        tables=tables,
        best=_describe_best(settings),
        metrics=_metrics(settings) | (analysis.metrics if analysis else {}),
        files=files,
    )
    for destination in sweep.destinations:
        destination.log_sweep(summary)
    _print(sweep, settings, refused, summary, analysis)


def _as_json(sweep: Sweep, settings: Sequence[Setting], analysis: Analysis | None) -> dict[str, Any]:
    """Return the results for programs: the settings, best first, each with its jobs in the order of seeds and folds."""
    jobs = [job for setting in settings for job in setting.jobs]
    if not jobs:
        return {"sweep": sweep.id, "name": sweep.name, "settings": []}
    return {
        "sweep": sweep.id,
        "name": sweep.name,
        "objective": objective_name(jobs),
        "lower_is_better": lower_is_better(jobs, sweep),
        "settings": [
            {
                "values": {key: _plain(value) for key, value in setting.values.items()},
                "mean": setting.mean,
                "spread": setting.spread,
                "n": len(setting.objectives),
                "verdict": setting.verdict,
                "jobs": [
                    {
                        "name": job.result.name,
                        "seed": job.values.get(SEED),
                        "fold": job.values.get(FOLD),
                        "objective": job.result.objective if job.has_objective else None,
                        "status": job.result.status,
                        "seconds": round(job.result.seconds, 3),
                    }
                    for job in setting.jobs
                ],
            }
            for setting in settings
        ],
        **({} if analysis is None else {analysis.name: analysis.json}),
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else show_value(value)


def _status(sweep: Sweep, jobs: Sequence[SweepJob]) -> str:
    statuses = {job.result.status for job in jobs}
    if sweep.stopped_by or not statuses.isdisjoint(("KILLED", "PAUSED", "QUEUED")):
        return "KILLED"
    return "FAILED" if "FAILED" in statuses else "FINISHED"


def _describe_best(settings: Sequence[Setting]) -> dict[str, str]:
    best = settings[0]
    if best.mean is None:
        return {}
    facts = {"setting": best.name, "mean": f"{best.mean:.6g}", "n": str(len(best.objectives))}
    if best.spread is not None:
        facts["spread"] = f"{best.spread:.4g}"
    if tied := [setting.name for setting in settings if setting.verdict == "tied"]:
        facts["tied"] = ", ".join(tied)
    return facts | {key: show_value(value) for key, value in best.values.items()}


def _metrics(settings: Sequence[Setting]) -> dict[str, float]:
    jobs = [job for setting in settings for job in setting.jobs]
    metrics = {"sweep/jobs": float(len(jobs)), "sweep/settings": float(len(settings))}
    metrics["sweep/finished"] = float(sum(job.result.status == "FINISHED" for job in jobs))
    metrics["sweep/pruned"] = float(sum(job.result.status == "PRUNED" for job in jobs))
    best = settings[0]
    if best.mean is not None:
        metrics[f"best/{objective_name(jobs)}"] = best.mean
    if best.spread is not None:
        metrics["sweep/spread"] = best.spread
    return metrics


def _print(
    sweep: Sweep, settings: Sequence[Setting], refused: int, summary: SweepSummary, analysis: Analysis | None
) -> None:
    """Print the outcomes of the jobs, the settings, the best of them, and the paths of everything."""
    jobs = [job for setting in settings for job in setting.jobs]
    statuses = Counter(job.result.status.lower() for job in jobs) + Counter(refused=refused)
    print(f"\n{sweep.name}: {', '.join(f'{count} {status}' for status, count in statuses.items())}")
    width = make_console(200).width
    lines: list[str] = []
    for shown in range(SHOWN_METRICS, -1, -1):
        lines = align(*tabulate_settings(settings[:SHOWN], metrics_of(jobs)[:shown]))
        if len(lines[0]) <= width:
            break
    print("\n".join(lines))
    if len(settings) > SHOWN:
        print(f"and {len(settings) - SHOWN} more, in {show_path(sweep.folder / 'settings.csv')}")
    rows = []
    best = settings[0]
    if best.mean is not None:
        spread = f" +- {best.spread:.2g} over {len(best.objectives)} runs" if best.spread is not None else ""
        name = f"{best.name}: " if best.values else ""
        rows.append(("best" if name else "mean", f"{name}{objective_name(jobs)} {best.mean:.4g}{spread}"))
    rows += [("tied", line) for line in describe_ties(settings)]
    if objectives := several_objectives(settings, sweep):
        front = [setting.name for setting in find_front(settings, objectives)]
        rows.append(("front", f"{list_first(front)}: none is better in {' and '.join(objectives)}"))
    pruned = [job for job in jobs if job.result.status == "PRUNED"]
    if pruned:
        them = "it" if len(pruned) == 1 else "them"
        rows.append(
            ("pruned", f"{len(pruned)} of {len(jobs)} jobs; the same command with --revive all trains {them} further")
        )
    if len(settings) > 1 and all(len(setting.scores) == 1 for setting in settings):
        is_single = all(len(setting.jobs) == 1 for setting in settings)
        remedy = "run each: add sweep=seeds" if is_single else "seed: add seed=0,1,2,3,4,5"
        rows.append(("note", f"one {remedy} to see whether the differences are more than chance"))
    if (unequal := describe_inequality(job.result.load for job in jobs)) is not None:
        rows.append(("note", unequal))
    rows += [] if analysis is None else analysis.lines
    if folders := left_out(sweep.folder):
        names = list_first([folder.name for folder in folders])
        rows.append(
            ("left out", f"{names}: runs of another length or config, or copies, which are not part of this sweep")
        )
    rows.append(("sweep", show_path(sweep.folder)))
    rows += [("report", show_path(file)) for file in summary.files if file.suffix == ".html"]
    rows += [("compare", command) for command in _ui_commands(sweep)]
    print(flush=True)
    print_block("", rows)


def _ui_commands(sweep: Sweep) -> list[str]:
    commands = (getattr(destination, "ui_command", None) for destination in sweep.destinations)
    return [command for command in commands if command]


def align(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table as lines of text, without columns that are empty."""
    columns, rows = without_empty(columns, rows)
    table = []
    for name, *values in zip(columns, *rows, strict=True):
        cells = ["-" if value is None else show_value(value) for value in values]
        table.append(Column([name], cells, is_number=all(isinstance(value, int | float | None) for value in values)))
    return draw_table(table)
