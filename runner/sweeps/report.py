"""The report of a sweep: an HTML file with its settings, plot and jobs, and the plot as separate files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from runner.files.whole import write_atomically
from runner.pictures.curves import read_curve
from runner.pictures.figure import render
from runner.sweeps.analysis import Analysis
from runner.sweeps.names import show_value
from runner.sweeps.objectives import find_front, find_importances, several_objectives
from runner.sweeps.plot import draw
from runner.sweeps.settings import Setting, Table, lower_is_better, objective_name, without_empty
from runner.sweeps.sweep import Sweep

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1d2733; max-width: 1180px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; overflow-wrap: anywhere } h2 { font-size: 1.15em; margin-top: 2em }
svg { width: 100%; height: auto }
div { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.9em; font-variant-numeric: tabular-nums }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #dfe4ea; white-space: nowrap }
th { background: #f2f5f8 } .text { text-align: left }
.settings tbody tr:first-child { font-weight: bold }
"""


def write_report(
    sweep: Sweep, settings: Sequence[Setting], tables: Mapping[str, Table], analysis: Analysis | None = None
) -> list[Path]:
    """Write `report.html`, `report.svg` and `report.png` to the folder of a sweep, and return their paths.

    Raises:
        OSError: a file cannot be written.
    """
    jobs = [job for setting in settings for job in setting.jobs]
    objective = objective_name(jobs)
    key = curve_key(objective)
    names = [job.result.name for setting in settings for job in setting.measured]
    curves = {name: curve for name in names if (curve := read_curve(sweep.folder / name, key)).steps}
    importances = find_importances(settings) if sweep.directions else {}
    figures = {"report": draw(settings, objective, curves, several_objectives(settings, sweep), importances)}
    if analysis is not None:
        figures[analysis.name] = analysis.draw()
    pictures = {f"{name}.{kind}": render(figure, kind) for name, figure in figures.items() for kind in ("svg", "png")}
    page = describe(sweep, settings, tables, _inline(pictures["report.svg"]))
    if analysis is not None:
        section = _describe_analysis(analysis, _inline(pictures[f"{analysis.name}.svg"]))
        page = page.replace("<h2>", f"{section}<h2>", 1)
    files = []
    for name, content in {"report.html": page.encode(), **pictures}.items():
        files.append(sweep.folder / name)
        write_atomically(files[-1], content)
    return files


def _inline(svg: bytes) -> str:
    """Return the `<svg>` element of an SVG file, to embed in a page."""
    text = svg.decode()
    return text[text.index("<svg") :]


def _describe_analysis(analysis: Analysis, svg: str) -> str:
    """Return the section of the page about an analysis."""
    paragraphs = "".join(
        f"<p>{escape(f'{label}: ' if label else '')}{escape(text)}</p>\n" for label, text in analysis.lines
    )
    return f"""<h2>{analysis.name.capitalize()}</h2>
{paragraphs}<div>{svg}</div>
{_tabulate(*analysis.table, kind=analysis.name)}
"""


def curve_key(objective: str) -> str:
    """Return the key under which an objective such as 'eval/loss' is logged: 'loss/eval/total'."""
    label, _, name = objective.partition("/")
    return f"loss/{label}/total" if name == "loss" else f"metrics/{objective}"


def describe(sweep: Sweep, settings: Sequence[Setting], tables: Mapping[str, Table], svg: str) -> str:
    """Return the page. Names and values come from users, and are escaped."""
    jobs = [job for setting in settings for job in setting.jobs]
    best = settings[0]
    missing = sum(not setting.objectives for setting in settings)
    without = f" {missing} of the settings have no result, and are not in the pictures." if missing else ""
    spread = "" if best.spread is None else f" &plusmn; {best.spread:.2g}"
    objectives = several_objectives(settings, sweep)
    names = escape(", ".join(setting.name for setting in find_front(settings, objectives)))
    front = f"<p>Pareto front of {escape(' and '.join(objectives))}: {names}.</p>" if objectives else ""
    better = "lower" if lower_is_better(jobs, sweep) else "higher"
    objective = escape(objective_name(jobs))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(sweep.name)}</title><style>{STYLE}</style></head><body>
<h1>{escape(sweep.name)}</h1>
<p>{len(settings)} settings, {len(jobs)} jobs, compared by {objective}: {better} is better.{without}</p>
<p>Best: <b>{escape(best.name)}</b>, {objective} {best.mean:.4g}{spread}, n = {len(best.objectives)}.</p>
{front}
<div>{svg}</div>
<h2>Settings, best first</h2>
<p>Jobs that differ only in seed or fold are one setting. {objective} is the mean over its n runs, the spread their
sample standard deviation. Settings with a missing result are ranked after complete ones.</p>
{_tabulate(*tables["settings"], kind="settings")}
<h2>Jobs</h2>
<details><summary>{len(jobs)} jobs with all their metrics</summary>{_tabulate(*tables["jobs"], kind="jobs")}</details>
</body></html>
"""


def _tabulate(columns: Sequence[str], rows: Sequence[Sequence[Any]], kind: str) -> str:
    columns, rows = without_empty(columns, rows)
    is_text = [any(isinstance(row[index], str) for row in rows) for index in range(len(columns))]
    starts = ['<{} class="text">' if has_text else "<{}>" for has_text in is_text]
    head = "".join(f"{start.format('th')}{escape(column)}</th>" for start, column in zip(starts, columns, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(
            f"{start.format('td')}{'' if value is None else escape(show_value(value))}</td>"
            for start, value in zip(starts, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
