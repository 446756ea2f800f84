"""The report of a sweep: one file, in which nothing that a user typed is more than text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sweep_results import result, sweep

from runner.pictures.curves import LoggedCurve, write_curves
from runner.records.result import Result
from runner.sweeps.report import curve_key, write_report
from runner.sweeps.settings import group_jobs, rank_jobs, tabulate_jobs, tabulate_settings


class Page(HTMLParser):
    """The elements of a page, and the texts of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
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
    ranked = sweep(folder=folder)
    ranked.name = "<i>mine</i>"
    jobs = rank_jobs(results, ranked)
    settings = group_jobs(jobs)
    tables = {"settings": tabulate_settings(settings, []), "jobs": tabulate_jobs(jobs)}
    files = write_report(ranked, settings, tables, ui_commands=ui_commands)
    assert [path.name for path in files] == ["report.html", "report.svg", "report.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    return Page(files[0].read_text())


def test_the_report_has_the_picture_and_both_tables_and_loads_nothing(tmp_path: Path):
    results = [result(value, f"lr={lr}", f"seed={seed}") for lr, seed, value in ((1, 0, 0.5), (1, 1, 0.7), (2, 0, 0.9))]
    results.append(result(None, "lr=3", "seed=0", status="FAILED"))
    for one in results[:3]:
        curve = LoggedCurve()
        for batch in (10, 20):
            curve.add(batch, 0.1)
        write_curves(tmp_path / one.name, {"metrics/eval/acc": curve, "loss/eval/total": LoggedCurve()})
    page = report(tmp_path, results)
    assert page.elements.count("svg") == 1 and page.elements.count("table") == 2
    assert page.cells[:5] == ["2", "0.9", "", "1", "1.23"]
    assert page.cells[6:11] == ["1", "0.6", "0.1414", "2", "1.23"]
    text = (tmp_path / "report.html").read_text()
    assert ">curves: mean over runs, band of one standard deviation<" in text
    assert "1 of the settings have no result" in text
    folders = [link for link in page.links if not link.startswith("#")]
    assert sorted(folders) == [f"{one.name}/" for one in results] and "script" not in page.elements
    assert not re.search(r"url\((?!#)", text)


def test_of_many_settings_the_best_are_drawn_and_listed(tmp_path: Path):
    results = [result(number / 1000, f"lr={number}") for number in range(250)]
    curve = LoggedCurve()
    curve.add(10, 0.1)
    for one in results:
        write_curves(tmp_path / one.name, {"metrics/eval/acc": curve})
    page = report(tmp_path, results)
    text = (tmp_path / "report.html").read_text()
    assert ">curves of the best 200 settings<" in text and "<p>50 more settings are in " in text
    assert page.elements.count("tr") == 2 + 200 + 250  # the head of each table, settings and jobs
    assert "settings.csv" in page.links


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "a & b", "$\\\\frac{$", "\"><img src=x onerror='a'>"])
def test_what_a_user_typed_is_text(tmp_path: Path, hostile: str):
    results = [result(0.5, 'note="' + hostile.replace('"', '\\"') + '"', f"seed={seed}") for seed in (0, 1)]
    results += [result(0.6, "note=plain", "seed=0")]
    for place, one in enumerate(results):
        one.name = f"{hostile}{place}".replace("/", "-")
        one.objective_name = "eval/<b>acc</b>"
    page = report(tmp_path, results)
    assert {"script", "img", "i"}.isdisjoint(page.elements) and page.elements.count("b") == 1
    assert not any(":" in link.partition("/")[0] for link in page.links)  # a name is no address
    assert any(hostile.replace("\\\\", "\\") in cell.replace("\\\\", "\\") for cell in page.cells)


def test_an_objective_is_found_among_the_curves():
    assert curve_key("eval/loss") == "loss/eval/total"
    assert curve_key("eval/MulticlassAccuracy") == "metrics/eval/MulticlassAccuracy"


def test_the_report_begins_with_the_question_and_the_answer(tmp_path: Path):
    values = ((1, 0, 0.5), (1, 1, 0.7), (2, 0, 0.4), (2, 1, 0.65))
    results = [result(value, f"lr={lr}", f"seed={seed}") for lr, seed, value in values]
    page = text_of(report(tmp_path, results, ["https://host/#/runs/1", "mlflow ui"]), tmp_path)
    assert "<h1>Which lr has the highest eval/acc?</h1>" in page
    assert (
        '<p class="answer"><b>lr=1</b> leads: eval/acc 0.6 &plusmn; 0.14, n = 2. lr=2 may be as good; 2 seeds' in page
    )
    assert "<em>tied</em>: the difference may be" in page
    assert '<dd><a href="https://host/#/runs/1">' in page and "<dd><code>mlflow ui</code></dd>" in page
    assert 'name="viewport"' in page and "@media print" in page


def test_the_report_says_how_the_sweep_was_made(tmp_path: Path):
    results = [result(0.5, "lr=1", "seed=0"), result(0.6, "lr=2", "seed=0")]
    environment = {"host": "<b>", "cpus": 2, "gpus": ["A100"], "packages": {"torch": "2.13"}, "git_commit": "abc123"}
    for one in results:
        one.started = 1.7e9
        (tmp_path / one.name).mkdir()
        (tmp_path / one.name / "environment.json").write_text(json.dumps(environment))
    page = text_of(report(tmp_path, results), tmp_path)
    assert "<dd>&lt;b&gt;, 2 cores, A100</dd>" in page and "torch 2.13" in page and "<dd>abc123</dd>" in page
    assert "<dt>trained</dt><dd>2023-11-1" in page and "<dt>command</dt><dd>python" in page


def test_a_damaged_record_does_not_stop_the_report(tmp_path: Path):
    results = [result(0.5, "lr=1", "seed=0"), result(0.6, "lr=2", "seed=0")]
    for one in results:
        (tmp_path / one.name).mkdir()
        (tmp_path / one.name / "environment.json").write_text('{"gpus": 3, "packages": [1]}')
    assert "<dt>machine</dt>" not in text_of(report(tmp_path, results), tmp_path)


def text_of(_: Page, folder: Path) -> str:
    return (folder / "report.html").read_text()
