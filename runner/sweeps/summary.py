"""The summary of a sweep: tables and a report in its folder, a summary for destinations, and the end of its output."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from runner.core.destination import SweepSummary
from runner.failures.exit_codes import DONE, ENVIRONMENT, FAILED, NAMES, WRONG_CONFIG
from runner.files.addresses import without_credentials
from runner.files.printable import csv_cell
from runner.files.whole import write_whole
from runner.records.folder import LOG
from runner.records.load import describe_inequality
from runner.records.result import FOLD, SEED, Result
from runner.records.sweep_jobs import left_out
from runner.sweeps import sweep
from runner.sweeps.ladder.rungs import Ladder, climb
from runner.sweeps.names import own_overrides, show_value
from runner.sweeps.objectives import find_front, several_objectives
from runner.sweeps.plan import name_job_in
from runner.sweeps.settings import (
    Setting,
    SweepJob,
    compare,
    group,
    lower_is_better,
    metrics_of,
    objective_name,
    tabulate_jobs,
    tabulate_settings,
    without_empty,
)
from runner.sweeps.sweep import Sweep
from runner.terminal.answer import give
from runner.terminal.console import make_console, print_block, show_path
from runner.terminal.text import Column, draw_table, print_to_stderr

log = logging.getLogger("runner")

SHOWN = 25  # settings in the table on the terminal
SHOWN_TIES = 3
SHOWN_METRICS = 3  # besides the objective, where they fit


def end_sweep() -> int:
    """Summarize the sweep that this process led, and return the exit code; 0 if it led none."""
    led = sweep.led
    sweep.led = None
    if led is None:
        return 0
    if led.progress is not None:
        led.progress.stop()
    results = led.results()
    led.clear_notes()
    refused = [one for one in results if one.status == "REFUSED"]
    jobs = compare([one for one in results if one.status != "REFUSED"], led)
    settings = group(jobs) if jobs else []
    ladder = climb(settings, lower_is_better(jobs, led)) if led.is_ladder and jobs else None
    try:
        if jobs:
            _summarize(led, jobs, settings, ladder, len(refused))
    except OSError as error:
        log.warning("the summary of the sweep was not written: %s", error)
    _print_errors(led, jobs, refused)
    statuses = {one.status for one in results}
    if results:
        described = _as_json(led, settings, ladder)
        every = [one.as_json() for one in [*(job.result for job in jobs), *refused]]
        give(result={"folder": str(led.folder), **described, "jobs": every})
    for number, handler in led.handlers.items():
        signal.signal(number, handler)
    if led.stopped_by:
        return 128 + led.stopped_by
    errors = [one.error or {} for one in results if one.status in ("FAILED", "REFUSED")]
    if errors:
        give(error=errors[0])
    if "REFUSED" in statuses:
        return WRONG_CONFIG
    if errors and all(one.get("code") == NAMES[ENVIRONMENT] for one in errors):
        return ENVIRONMENT
    return FAILED if not statuses.isdisjoint(("FAILED", "KILLED")) else DONE


def _print_errors(led: Sweep, jobs: Sequence[SweepJob], refused: Sequence[Result]) -> None:
    """Print each error once, with the jobs that it ended."""
    ended: dict[tuple[str, str], list[Result]] = {}
    for job in jobs:
        if job.result.status in ("FAILED", "DIVERGED"):
            ended.setdefault((job.result.status, job.result.message), []).append(job.result)
    for (status, _), results in ended.items():
        first, *others = results
        more = f" and {len(others)} more" if others else ""
        where = show_path(led.folder / first.name / LOG)
        print_to_stderr(f"{first.name}{more}: {status}, see {where}\n{(first.trace or first.message).rstrip()}")
    for message in dict.fromkeys(one.message for one in refused):
        first, *others = (one for one in refused if one.message == message)
        own = own_overrides(first.overrides, led.fixed)
        print_to_stderr(f"error: {without_credentials(name_job_in(message, first.wrong_key, own, len(others)))}")


def _summarize(
    led: Sweep, jobs: list[SweepJob], settings: Sequence[Setting], ladder: Ladder | None, refused: int
) -> None:
    """Write the tables and the report to the sweep's folder, pass them to destinations, and print the settings.

    `refused` jobs could not start, and left nothing behind.
    """
    known = [job.result for job in jobs if job.result.objective_name]
    if led.direction and any(one.lower_is_better != (led.direction == "minimize") for one in known):
        log.warning("hydra.sweeper.direction=%s is the wrong direction for %s", led.direction, objective_name(jobs))
    tables = {"settings": tabulate_settings(settings, metrics_of(jobs)), "jobs": tabulate_jobs(jobs)}
    if ladder is not None:
        tables = {"ladder": ladder.tabulate(), **tables}
    files = []
    for name, (columns, rows) in tables.items():
        text = io.StringIO(newline="")
        csv.writer(text).writerows(map(csv_cell, row) for row in [columns, *rows])
        files.append(led.folder / f"{name}.csv")
        write_whole(files[-1], text.getvalue())
    files.append(led.folder / "results.json")
    write_whole(files[-1], json.dumps(_as_json(led, settings, ladder), indent=1))
    if settings[0].objectives:
        from runner.sweeps.report import write_report

        files += write_report(led, settings, tables, ladder)
    summary = SweepSummary(
        folder=led.folder,
        sweep=led.id,
        name=led.name,
        status=_status(led, jobs),
        tables=tables,
        best=_describe_best(settings),
        metrics=_metrics(settings) | (ladder.metrics() if ladder else {}),
        files=files,
    )
    for destination in led.destinations:
        destination.log_sweep(summary)
    _print(led, settings, refused, summary, ladder)


def _as_json(led: Sweep, settings: Sequence[Setting], ladder: Ladder | None) -> dict[str, Any]:
    """Return the results for programs: the settings, best first, each with its jobs in the order of their seeds."""
    jobs = [job for setting in settings for job in setting.jobs]
    if not jobs:
        return {"sweep": led.id, "name": led.name, "settings": []}
    return {
        "sweep": led.id,
        "name": led.name,
        "objective": objective_name(jobs),
        "lower_is_better": lower_is_better(jobs, led),
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
                        "objective": job.result.objective if job.is_done else None,
                        "status": job.result.status,
                        "seconds": round(job.result.seconds, 3),
                    }
                    for job in setting.jobs
                ],
            }
            for setting in settings
        ],
        **({} if ladder is None else {"ladder": ladder.as_json()}),
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else show_value(value)


def _status(led: Sweep, jobs: Sequence[SweepJob]) -> str:
    statuses = {job.result.status for job in jobs}
    if led.stopped_by or not statuses.isdisjoint(("KILLED", "PAUSED", "QUEUED")):
        return "KILLED"
    return "FAILED" if "FAILED" in statuses else "FINISHED"


def _describe_best(settings: Sequence[Setting]) -> dict[str, str]:
    best = settings[0]
    if best.mean is None:
        return {}
    facts = {"setting": best.name, "mean": f"{best.mean:.6g}", "n": str(len(best.objectives))}
    if best.spread is not None:
        facts["spread"] = f"{best.spread:.4g}"
    if tied := [one.name for one in settings if one.verdict == "tied"]:
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


def _print(led: Sweep, settings: Sequence[Setting], refused: int, summary: SweepSummary, ladder: Ladder | None) -> None:
    """Print how the jobs ended, the settings, the best of them, and where everything is."""
    jobs = [job for setting in settings for job in setting.jobs]
    statuses = Counter(job.result.status.lower() for job in jobs) + Counter(refused=refused)
    print(f"\n{led.name}: {', '.join(f'{count} {status}' for status, count in statuses.items())}")
    width = make_console(200).width
    for shown in range(SHOWN_METRICS, -1, -1):
        lines = align(*tabulate_settings(settings[:SHOWN], metrics_of(jobs)[:shown]))
        if len(lines[0]) <= width:
            break
    print("\n".join(lines))
    if len(settings) > SHOWN:
        print(f"and {len(settings) - SHOWN} more, in {show_path(led.folder / 'settings.csv')}")
    rows = []
    best = settings[0]
    if best.mean is not None:
        spread = f" +- {best.spread:.2g} over {len(best.objectives)} runs" if best.spread is not None else ""
        name = f"{best.name}: " if best.values else ""
        rows.append(("best" if name else "mean", f"{name}{objective_name(jobs)} {best.mean:.4g}{spread}"))
    rows += [("tied", line) for line in _describe_ties(settings)]
    if objectives := several_objectives(settings, led):
        front = [one.name for one in find_front(settings, objectives)]
        rows.append(("front", f"{_shortened(front)}: none is better in {' and '.join(objectives)}"))
    pruned = [job for job in jobs if job.result.status == "PRUNED"]
    if pruned:
        one = "it" if len(pruned) == 1 else "them"
        rows.append(
            ("pruned", f"{len(pruned)} of {len(jobs)} jobs; the same command with --revive all trains {one} further")
        )
    if len(settings) > 1 and all(len(setting.losses) == 1 for setting in settings):
        is_single = all(len(setting.jobs) == 1 for setting in settings)
        what = "run each: add sweep=seeds" if is_single else "seed: add seed=0,1,2,3,4,5"
        rows.append(("note", f"one {what} to see whether the differences are more than chance"))
    if (unequal := describe_inequality(job.result.load for job in jobs)) is not None:
        rows.append(("note", unequal))
    rows += [] if ladder is None else ladder.lines()
    if others := left_out(led.folder):
        names = _shortened([one.name for one in others])
        rows.append(("left out", f"{names}: not what this sweep asks for, but another length or config, or a copy"))
    rows.append(("sweep", show_path(led.folder)))
    rows += [("report", show_path(file)) for file in summary.files if file.suffix == ".html"]
    commands = (getattr(one, "ui_command", None) for one in led.destinations)
    rows += [("compare", command) for command in commands if command]
    print(flush=True)
    print_block("", rows)


def _describe_ties(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield which settings may be just as good as the first, and how many seeds could decide."""
    tied = [one.name for one in settings if one.verdict == "tied"]
    if not tied:
        return
    names = _shortened(tied)
    compared = sum(bool(one.verdict) for one in settings) - 1
    from runner.comparing.decision import LEVEL, count_needed

    least = count_needed(math.inf, LEVEL / compared)
    n = len(settings[0].losses)
    too_few = f"; {n} seeds cannot tell {compared + 1} settings apart, {least} can" if least and n < least else ""
    yield f"{names} may be as good{too_few}"


def _shortened(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    return ", ".join(names[:SHOWN_TIES]) + (f" and {len(names) - SHOWN_TIES} more" if len(names) > SHOWN_TIES else "")


def align(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table as lines of text, without columns that are empty."""
    columns, rows = without_empty(columns, rows)
    drawn = []
    for name, *values in zip(columns, *rows, strict=True):
        cells = ["-" if value is None else show_value(value) for value in values]
        drawn.append(Column([name], cells, is_number=all(isinstance(value, int | float | None) for value in values)))
    return draw_table(drawn)
