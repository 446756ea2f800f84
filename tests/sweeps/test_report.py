"""The report of a sweep: one HTML file, in which all text of the user is escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from sweep_results import result, sweep

from runner.pictures.curves import LoggedCurve, write_curves
from runner.records.result import Result
from runner.sweeps.report import curve_key, write_report
from runner.sweeps.settings import group_jobs, rank_jobs, tabulate_jobs, tabulate_settings


class Page(HTMLParser):
    """The text, elements and links of a page, and the texts of its table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "onload", "onclick")
        ]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.elements[-1:] == ["td"]:
            self.cells[-1] += data.strip()


def report(folder: Path, results: list[Result], ui_commands: Sequence[str] = ()) -> Page:
    """Write the report of a sweep with these results, and return its page."""
    ranked = sweep(folder=folder)
    ranked.name = "<i>mine</i>"
    jobs = rank_jobs(results, ranked)
    settings = group_jobs(jobs)
    tables = {"settings": tabulate_settings(settings, []), "jobs": tabulate_jobs(jobs)}
    files = write_report(ranked, settings, tables, ui_commands=ui_commands)
    assert [path.name for path in files] == ["report.html", "report.svg", "report.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    return Page(files[0].read_text())


def test_the_report_has_a_picture_and_two_tables_and_loads_no_files(tmp_path: Path):
    results = [result(value, f"lr={lr}", f"seed={seed}") for lr, seed, value in ((1, 0, 0.5), (1, 1, 0.7), (2, 0, 0.9))]
    results.append(result(None, "lr=3", "seed=0", status="FAILED"))
    for job in results[:3]:
        curve = LoggedCurve()
        for batch in (10, 20):
            curve.add(batch, 0.1)
        write_curves(tmp_path / job.name, {"metrics/eval/acc": curve, "loss/eval/total": LoggedCurve()})
    page = report(tmp_path, results)
    assert page.elements.count("svg") == 1 and page.elements.count("table") == 2
    assert page.cells[:5] == ["2", "0.9", "", "1", "1.23"]
    assert page.cells[6:11] == ["1", "0.6", "0.1414", "2", "1.23"]
    assert ">curves: mean over runs, band of one standard deviation<" in page.text
    assert "1 of the settings have no result" in page.text
    folders = [link for link in page.links if not link.startswith("#")]
    assert sorted(folders) == [f"{job.name}/" for job in results] and "script" not in page.elements
    assert not re.search(r"url\((?!#)", page.text)


def test_only_the_best_200_settings_are_drawn_and_listed(tmp_path: Path):
    results = [result(number / 1000, f"lr={number}") for number in range(205)]
    curve = LoggedCurve()
    curve.add(10, 0.1)
    for job in results:
        write_curves(tmp_path / job.name, {"metrics/eval/acc": curve})
    page = report(tmp_path, results)
    assert ">curves of the best 200 settings<" in page.text and "<p>5 more settings are in " in page.text
    assert page.elements.count("tr") == 2 + 200 + 205  # two header rows, settings and jobs
    assert "settings.csv" in page.links


HOSTILE = ("<script>alert(1)</script>", "a & b", "$\\\\frac{$", "\"><img src=x onerror='a'>")


def test_text_of_the_user_is_escaped(tmp_path: Path):
    notes = ['"{}"'.format(text.replace('"', '\\"')) for text in HOSTILE]
    results = [result(0.5, f"note={note}", f"seed={seed}") for note in notes for seed in (0, 1)]
    results += [result(0.6, "note=plain", "seed=0")]
    for number, job in enumerate(results):
        job.name = f"{HOSTILE[number % len(HOSTILE)]}{number}".replace("/", "-")
        job.objective_name = "eval/<b>acc</b>"
    page = report(tmp_path, results)
    assert {"script", "img", "i"}.isdisjoint(page.elements) and page.elements.count("b") == 1
    assert not any(":" in link.partition("/")[0] for link in page.links)  # no name becomes a URL
    cells = [cell.replace("\\\\", "\\") for cell in page.cells]
    for text in HOSTILE:
        assert any(text.replace("\\\\", "\\") in cell for cell in cells), text


def test_objectives_have_the_keys_of_their_curves():
    assert curve_key("eval/loss") == "loss/eval/total"
    assert curve_key("eval/MulticlassAccuracy") == "metrics/eval/MulticlassAccuracy"


def test_the_report_begins_with_the_question_and_the_answer(tmp_path: Path):
    values = ((1, 0, 0.5), (1, 1, 0.7), (2, 0, 0.4), (2, 1, 0.65))
    results = [result(value, f"lr={lr}", f"seed={seed}") for lr, seed, value in values]
    page = report(tmp_path, results, ["https://host/#/runs/1", "mlflow ui"]).text
    assert "<h1>Which lr has the highest eval/acc?</h1>" in page
    answer = '<p class="answer"><b>lr=1</b> leads: eval/acc 0.6 &plusmn; 0.14, n = 2. lr=2 may be as good; 2 seeds'
    assert answer in page
    assert "<em>tied</em>: the difference may be" in page
    assert '<dd><a href="https://host/#/runs/1">' in page and "<dd><code>mlflow ui</code></dd>" in page
    assert 'name="viewport"' in page and "@media print" in page


def test_the_report_shows_machine_packages_date_and_command(tmp_path: Path):
    results = [result(0.5, "lr=1", "seed=0"), result(0.6, "lr=2", "seed=0")]
    environment = {"host": "<b>", "cpus": 2, "gpus": ["A100"], "packages": {"torch": "2.13"}, "git_commit": "abc123"}
    for job in results:
        job.started = 1.7e9
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / "environment.json").write_text(json.dumps(environment))
    page = report(tmp_path, results).text
    assert "<dd>&lt;b&gt;, 2 cores, A100</dd>" in page and "torch 2.13" in page and "<dd>abc123</dd>" in page
    assert "<dt>trained</dt><dd>2023-11-1" in page and "<dt>command</dt><dd>python" in page


def test_a_damaged_record_does_not_stop_the_report(tmp_path: Path):
    results = [result(0.5, "lr=1", "seed=0"), result(0.6, "lr=2", "seed=0")]
    for job in results:
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / "environment.json").write_text('{"gpus": 3, "packages": [1]}')
    assert "<dt>machine</dt>" not in report(tmp_path, results).text
