"""The summary at the end of a sweep: printed, written to files, and passed to destinations."""

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
    """End a sweep with these results in a terminal of 80 columns, and return its exit code and summary."""
    receiver = Receiver()
    sweep = Sweep(folder, "id", "sweep-lr-seed", "identity", ["model"], destinations=[receiver])
    for job in results:
        (folder / job.name).mkdir(parents=True)
        job.write(folder / job.name)
        claim(folder, sweep.key_of_job(job.overrides), folder / job.name, job.identity)
    monkeypatch.setattr(sweeps, "current", sweep)
    monkeypatch.setattr("runner.sweeps.summary.make_console", lambda _: type("Console", (), {"width": 80}))
    return end_sweep(), receiver.summary


def test_the_best_setting_is_printed_written_and_passed_on(
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
    assert [setting["verdict"] for setting in content["settings"]] == ["leads", "tied", "", ""]
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
    printed = capsys.readouterr()
    assert code == 1 and summary.best == {}
    assert printed.err == f"seed0 and 2 more: FAILED, see sweep/seed0/console.log\n{error}"
    assert not (tmp_path / "sweep" / "report.html").exists() and "best" not in printed.out


def test_settings_with_one_run_each_get_advice_to_add_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    finished = [job for job in GRID if job.overrides[1] == "seed=0" and job.status == "FINISHED"]
    results = [replace(job, overrides=[job.overrides[0]]) for job in finished]
    end(tmp_path / "sweep", results, monkeypatch)
    assert "one run each: add sweep=seeds" in capsys.readouterr().out


def test_printed_tables_have_no_trailing_blanks_or_empty_columns():
    lines = align(["name", "value", "empty", "text"], [["a", 0.123456, None, "long text"], ["bcdef", None, "", ""]])
    assert lines == ["name    value  text", "a      0.1235  long text", "bcdef       -"]
