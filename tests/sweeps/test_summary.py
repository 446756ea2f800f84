"""The summary that a sweep leaves for people and programs when it ends."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_results import GRID

from runner.callbacks import InMemoryLogger
from runner.core.destination import SweepSummary
from runner.records.result import Result
from runner.records.sweep_jobs import claim
from runner.sweeps import sweep as sweeps
from runner.sweeps.summary import align, end_sweep
from runner.sweeps.sweep import Sweep


class Receiver(InMemoryLogger):
    """Keeps the summary of a sweep."""

    summary: SweepSummary

    def log_sweep(self, summary: SweepSummary) -> None:
        self.summary = summary


def end(folder: Path, results: list[Result], monkeypatch: pytest.MonkeyPatch) -> tuple[int, SweepSummary]:
    """End a sweep of jobs with these results in a terminal of 80 columns."""
    receiver = Receiver()
    ended = Sweep(folder, "id", "sweep-lr-seed", "identity", ["model"], destinations=[receiver])
    for one in results:
        (folder / one.name).mkdir(parents=True)
        one.write(folder / one.name)
        claim(folder, ended.key_of_job(one.overrides), folder / one.name, one.identity)
    monkeypatch.setattr(sweeps, "current", ended)
    monkeypatch.setattr("runner.sweeps.summary.make_console", lambda _: type("Console", (), {"width": 80}))
    return end_sweep(), receiver.summary


def test_the_best_is_a_setting_in_what_is_printed_and_written_and_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    code, summary = end(tmp_path / "sweep", GRID, monkeypatch)
    assert code == 1  # a job has failed
    best = {"setting": "lr=0.01", "mean": "0.6", "n": "2", "spread": "0.1414", "tied": "lr=10"}
    assert summary.best == best | {"optimizer.lr": "0.01"}
    assert summary.metrics["best/eval/acc"] == pytest.approx(0.6)
    assert summary.metrics["sweep/spread"] == pytest.approx(0.02**0.5)
    assert summary.metrics["sweep/settings"] == 4 and summary.metrics["sweep/finished"] == 7
    names = ["settings.csv", "jobs.csv", "results.json", "report.html", "report.svg", "report.png"]
    assert [path.name for path in summary.files] == names and all(path.exists() for path in summary.files)
    assert [*summary.tables] == ["settings", "jobs"]

    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "sweep-lr-seed: 7 finished, 1 failed"
    assert lines[2] == "  lr  eval/acc  spread  n  verdict  train/acc  seconds  missing"
    assert lines[3] == "0.01       0.6  0.1414  2  leads          0.5     1.23"
    assert lines[5].endswith("1 not finite") and lines[6].endswith("1 failed")
    assert any(line.startswith("best") and "lr=0.01: eval/acc 0.6 +- 0.14 over 2 runs" in line for line in lines)
    assert "tied    lr=10 may be as good; 2 seeds cannot tell 2 settings apart, 6 can" in lines
    assert any(line.split() == ["report", "sweep/report.html"] for line in lines)

    with (tmp_path / "sweep" / "settings.csv").open(newline="") as file:
        assert [row["lr"] for row in csv.DictReader(file)] == ["0.01", "10.0", "0.1", "1.0"]
    content = json.loads((tmp_path / "sweep" / "results.json").read_text())
    assert content["objective"] == "eval/acc" and content["lower_is_better"] is False
    assert [one["verdict"] for one in content["settings"]] == ["leads", "tied", "", ""]
    assert content["settings"][0]["values"] == {"optimizer.lr": 0.01}
    assert [(job["seed"], job["objective"]) for job in content["settings"][2]["jobs"]] == [(0, 0.9), (1, None)]
    assert [job["status"] for job in content["settings"][3]["jobs"]] == ["FAILED", "FINISHED"]


def test_an_error_of_many_jobs_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    error = "Traceback (most recent call last):\n  File ...\nRuntimeError: no\n"
    results = [
        Result("FAILED", f"seed{seed}", "id", [f"seed={seed}"], error={"message": "RuntimeError: no"}, trace=error)
        for seed in range(3)
    ]
    code, summary = end(tmp_path / "sweep", results, monkeypatch)
    written = capsys.readouterr()
    assert code == 1 and summary.best == {}
    assert written.err == f"seed0 and 2 more: FAILED, see sweep/seed0/console.log\n{error}"
    assert not (tmp_path / "sweep" / "report.html").exists() and "best" not in written.out


def test_one_run_each_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    finished = [one for one in GRID if one.overrides[1] == "seed=0" and one.status == "FINISHED"]
    results = [replace(one, overrides=[one.overrides[0]]) for one in finished]
    end(tmp_path / "sweep", results, monkeypatch)
    assert "one run each: add sweep=seeds" in capsys.readouterr().out


def test_a_table_has_no_blanks_at_its_ends_and_no_empty_column():
    lines = align(["name", "value", "empty", "text"], [["a", 0.123456, None, "long text"], ["bcdef", None, "", ""]])
    assert lines == ["name    value  text", "a      0.1235  long text", "bcdef       -"]
