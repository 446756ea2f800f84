"""The report of a sweep: a page for colleagues with question, answer, pictures and jobs, and the pictures as files."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner.files.addresses import hidden_everywhere
from runner.files.whole import write_atomically
from runner.pictures.curves import read_curve
from runner.pictures.figure import render
from runner.records.record import Record
from runner.sweeps.analysis import Analysis
from runner.sweeps.decide.outcome import introduce
from runner.sweeps.names import short_names, show_value
from runner.sweeps.objectives import find_front, find_importances, several_objectives
from runner.sweeps.plot import MAX_LINES, draw
from runner.sweeps.settings import (
    Setting,
    SweepJob,
    Table,
    describe_ties,
    lower_is_better,
    objective_name,
    without_empty,
)
from runner.sweeps.sweep import Sweep
from runner.terminal.commands import show_typed, typed_command

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2733; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em; break-after: avoid }
svg { width: 100%; height: auto }
div { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.9em; font-variant-numeric: tabular-nums }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #dfe4ea; white-space: nowrap }
th { background: #f2f5f8 } .text { text-align: left } tr, div { break-inside: avoid }
.answer { font-size: 1.15em } .settings tbody tr:first-child { font-weight: bold }
dt { font-weight: bold; float: left; clear: left; width: 6em } dd { margin: 0 0 0.2em 7em; overflow-wrap: anywhere }
@media (max-width: 600px) { body { font-size: 14px; margin: 1em auto } .pictures svg { width: 800px } }
@media print { body { margin: 0; max-width: none } div { overflow: visible } td { white-space: normal } }
"""
VERDICTS = """A verdict compares a setting with the first, over equal seeds. <em>tied</em>: the difference may be
chance, so either may be better. <em>worse</em>: it is not chance, at a level of 5 % for all settings together.
<em>leads</em>: first, but tied with others. <em>best</em>: all others are worse."""


DECISION = """The settings are compared after each seed. An interval contains the true difference with a probability of
95 %. If there were no difference, evidence this strong would come with a probability of at most p. Both hold after any
number of seeds."""


def write_report(
    sweep: Sweep,
    settings: Sequence[Setting],
    tables: Mapping[str, Table],
    analysis: Analysis | None = None,
    ui_commands: Sequence[str] = (),
) -> list[Path]:
    """Write `report.html`, `report.svg` and `report.png` to the folder of a sweep, and return their paths.

    Args:
        sweep: the sweep.
        settings: its settings, best first.
        tables: its tables by name: `settings` and `jobs`.
        analysis: what a ladder or a decision has found out.
        ui_commands: commands or addresses that show the runs in other programs.

    Raises:
        OSError: a file cannot be written.
    """
    jobs = [job for setting in settings for job in setting.jobs]
    objective = objective_name(jobs)
    key = curve_key(objective)
    measured = [setting for setting in settings if setting.objectives][:MAX_LINES]
    names = [job.result.name for setting in measured for job in setting.measured]
    curves = {name: curve for name in names if (curve := read_curve(sweep.folder / name, key)).steps}
    importances = find_importances(settings) if sweep.directions else {}
    figures = {"report": draw(settings, objective, curves, several_objectives(settings, sweep), importances)}
    if analysis is not None:
        figures[analysis.name] = analysis.draw()
    pictures = {f"{name}.{kind}": render(figure, kind) for name, figure in figures.items() for kind in ("svg", "png")}
    sections = [
        _answer(sweep, settings, analysis),
        _facts(sweep, jobs, ui_commands),
        *([] if analysis is None else [_analysis(sweep, analysis, _inline(pictures[f"{analysis.name}.svg"]))]),
        f'<div class="pictures">{_inline(pictures["report.svg"])}</div>',
        _settings(objective, tables["settings"]),
        _jobs(tables["jobs"]),
    ]
    page = _page(sweep.name, sections)
    files = []
    for name, content in {"report.html": page.encode(), **pictures}.items():
        files.append(sweep.folder / name)
        write_atomically(files[-1], content)
    return files


def _page(title: str, sections: Sequence[str]) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
{"".join(f"{section.strip()}{chr(10)}" for section in sections)}</body></html>
"""


def _inline(svg: bytes) -> str:
    """Return the `<svg>` element of an SVG file, to embed in a page."""
    text = svg.decode()
    return text[text.index("<svg") :]


def _analysis(sweep: Sweep, analysis: Analysis, svg: str) -> str:
    """Return the section about an analysis."""
    lines = analysis.lines
    table = _tabulate(*analysis.table, kind=analysis.name)
    explanation = ""
    if sweep.contest is not None:
        named = [*introduce(sweep.contest)]  # the page begins with these, and with the answer
        lines = [line for line in lines[1:] if line[1] not in named]
        table = f"<details><summary>the objective of each setting with each seed</summary>{table}</details>"
        explanation = f"<p>{DECISION}</p>"
    paragraphs = "".join(f"<p>{escape(f'{label}: ' if label else '')}{escape(text)}</p>\n" for label, text in lines)
    return f"""<h2>{analysis.name.capitalize()}</h2>
{paragraphs}{explanation}<div class="pictures">{svg}</div>
{table}
"""


def curve_key(objective: str) -> str:
    """Return the key under which an objective such as 'eval/loss' is logged: 'loss/eval/total'."""
    label, _, name = objective.partition("/")
    return f"loss/{label}/total" if name == "loss" else f"metrics/{objective}"


def _answer(sweep: Sweep, settings: Sequence[Setting], analysis: Analysis | None) -> str:
    """Return the question and the answer. Names and values come from users, and are escaped."""
    jobs = [job for setting in settings for job in setting.jobs]
    best = settings[0]
    objective = objective_name(jobs)
    better = "lowest" if lower_is_better(jobs, sweep) else "highest"
    keys = " and ".join(short_names(sorted({key for setting in settings for key in setting.values})).values())
    question = f"Which {keys} has the {better} {objective}?" if keys else f"{objective} over {len(jobs)} runs"
    spread = "" if best.spread is None else f" &plusmn; {best.spread:.2g}"
    value = f"{escape(objective)} {best.mean:.4g}{spread}, n = {len(best.objectives)}"
    verb = {"best": "is the best", "leads": "leads"}.get(best.verdict, "comes first")
    ties = "".join(f" {escape(line)}." for line in describe_ties(settings))
    missing = sum(not setting.objectives for setting in settings)
    without = f" {missing} of the settings have no result, and are not in the pictures." if missing else ""
    answer = f"<b>{escape(best.name)}</b> {verb}: {value}.{ties}" if keys else f"Mean: {value}."
    if analysis is not None and analysis.lines:
        answer = f"<b>{escape(analysis.lines[0][1])}</b>."
    if sweep.contest is not None:
        answer += "".join(f"<br>{escape(line)}" for line in introduce(sweep.contest))
    objectives = several_objectives(settings, sweep)
    front = ""
    if objectives:
        names = ", ".join(setting.name for setting in find_front(settings, objectives))
        front = f"<p>Pareto front of {escape(' and '.join(objectives))}: {escape(names)}.</p>"
    return f"""<h1>{escape(question)}</h1>
<p class="answer">{answer}</p>
<p>{escape(sweep.name)}: {len(settings)} settings, {len(jobs)} jobs.{without}</p>
{front}"""


def _facts(sweep: Sweep, jobs: Sequence[SweepJob], ui_commands: Sequence[str]) -> str:
    """Return a list of how the sweep was made, and where its runs are."""
    record = Record(sweep.folder / jobs[0].result.name).environment
    packages = record.get("packages")
    versions = {"python": record.get("python"), **(packages if isinstance(packages, dict) else {})}
    times = sorted(job.result.started for job in jobs if job.result.started)
    days = [datetime.datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M %Z") for time in times]
    facts = {
        "command": show_typed(hidden_everywhere(typed_command())),
        "trained": " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
        "machine": _machine(record),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": str(record.get("git_commit") or ""),
    }
    rows = [(name, escape(text)) for name, text in facts.items() if text]
    is_address = {text: text.startswith(("http://", "https://")) for text in ui_commands}
    rows += [("compare", _link(text) if is_address[text] else f"<code>{escape(text)}</code>") for text in ui_commands]
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>\n" for name, text in rows) + "</dl>"


def _machine(record: Mapping[str, Any]) -> str:
    """Return a machine as text from the record of an environment, which may be damaged; empty if it is unknown."""
    host, cpus, gpus = (record.get(key) for key in ("host", "cpus", "gpus"))
    if not isinstance(host, str) or not isinstance(cpus, int):
        return ""
    return ", ".join([host, f"{cpus} cores", *(map(str, gpus) if isinstance(gpus, list) else ())])


def _link(address: str, text: str = "") -> str:
    return f'<a href="{escape(address)}">{escape(text or address)}</a>'


def _settings(objective: str, table: Table) -> str:
    """Return the section with the settings."""
    columns, rows = table
    verdicts = f"\n{VERDICTS}" if "verdict" in without_empty(columns, rows)[0] else ""
    left = len(rows) - MAX_LINES
    rest = f"\n<p>{left:,} more settings are in {_link('settings.csv')}.</p>" if left > 0 else ""
    return f"""<h2>Settings, best first</h2>
<p>Jobs that differ only in seed or fold are one setting. {escape(objective)} is the mean over its n runs, the spread
their sample standard deviation. Settings with a missing result are ranked after complete ones.{verdicts}</p>
{_tabulate(columns, rows[:MAX_LINES], kind="settings")}{rest}"""


def _jobs(table: Table) -> str:
    """Return the section with the jobs, each with a link to its folder."""
    rows = _tabulate(*table, kind="jobs", link=True)
    return f"""<h2>Jobs</h2>
<details><summary>{len(table[1])} jobs with all their metrics, and their folders</summary>{rows}</details>"""


def _tabulate(columns: Sequence[str], rows: Sequence[Sequence[Any]], kind: str, link: bool = False) -> str:
    """Return a table; with `link`, the first cell of a row is the name of a folder, and a link to it."""
    columns, rows = without_empty(columns, rows)
    is_text = [any(isinstance(row[index], str) for row in rows) for index in range(len(columns))]
    starts = ['<{} class="text">' if has_text else "<{}>" for has_text in is_text]
    head = "".join(f"{start.format('th')}{escape(column)}</th>" for start, column in zip(starts, columns, strict=True))
    lines = []
    for row in rows:
        cells = ["" if value is None else escape(show_value(value)) for value in row]
        if link:
            cells[0] = _link(f"{quote(str(row[0]))}/", str(row[0]))
        lines.append("".join(f"{start.format('td')}{cell}</td>" for start, cell in zip(starts, cells, strict=True)))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
