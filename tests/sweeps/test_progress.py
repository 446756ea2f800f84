"""The lines that a sweep prints while its jobs run, which it reads from the folders of the jobs."""

from __future__ import annotations

import math
import os
import pty
from pathlib import Path
from typing import Any

import pytest
from python_process import wait_until

from runner.records.result import Result
from runner.records.sweep_jobs import claim
from runner.sweeps.progress import INTERVAL, SweepProgress
from runner.sweeps.sweep import Sweep

PLANNED = [[f"lr={lr}", f"seed={seed}"] for lr in (0.01, 0.3) for seed in (0, 1)]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(tmp_path)
    return Sweep(tmp_path, "id", "sweep-lr-seed-mlp-digits", "identity", ["model"])


def write_job(sweep: Sweep, folder: str, overrides: list[str], status: str = "FINISHED", **facts: Any) -> None:
    """Write the folder of a job, with a result that has this status and these fields."""
    (sweep.folder / folder).mkdir(exist_ok=True)
    facts = {"objective": 0.98243, "objective_name": "eval/MulticlassAccuracy", "seconds": 12.0} | facts
    Result(status, folder, "id", [*overrides, "model=mlp"], **facts).write(sweep.folder / folder)
    if status != "REFUSED":
        claim(sweep.folder, sweep.key_of_job(overrides), sweep.folder / folder, "id")


def printed_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_each_job_that_ends_prints_a_line(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    write_job(sweep, "a", PLANNED[0], "RUNNING")
    progress._check()
    write_job(sweep, "a", PLANNED[0])
    progress._check()
    write_job(sweep, "b", PLANNED[1], "FAILED", error={"message": "RuntimeError: https://u:secret@host failed"})
    progress._check()
    write_job(sweep, "c", PLANNED[2], "DIVERGED", objective=math.nan, seconds=6.0)
    progress._check()
    write_job(sweep, ".refused-3", PLANNED[3], "REFUSED", error={"message": "data: no images\n  more"})
    progress.stop()
    progress._check()
    lines = printed_lines(capsys)
    assert lines[0] == "sweep-lr-seed-mlp-digits: 4 jobs in ."
    assert lines[1] == "1/4  lr=0.01 seed=0  eval 0.9824      12 s  36 s left"
    assert lines[2].startswith("2/4  lr=0.01 seed=1  FAILED          12 s  RuntimeError: https://")
    assert "secret" not in lines[2]
    assert lines[3] == "3/4  lr=0.3 seed=0   DIVERGED       6.0 s  10 s left"
    assert lines[4] == "4/4  lr=0.3 seed=1   REFUSED     data: no images"
    assert len(lines) == 5


def test_finished_jobs_of_an_earlier_command_are_skipped_and_failed_ones_awaited(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
):
    write_job(sweep, "a", PLANNED[0])
    write_job(sweep, "b", PLANNED[1], "FAILED", error={"message": "RuntimeError: before"})
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    progress._check()
    lines = printed_lines(capsys)
    assert lines[1:] == [
        "1/4  lr=0.01 seed=0  eval 0.9824  skipped: it has already ended",
        "--afresh trains these again, in a new sweep",
    ]
    write_job(sweep, "b", PLANNED[1], seconds=20.0)
    progress.stop()
    assert printed_lines(capsys) == ["2/4  lr=0.01 seed=1  eval 0.9824      20 s  40 s left"]


def test_the_remaining_time_is_divided_by_concurrent_jobs(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    write_job(sweep, "a", PLANNED[0], "RUNNING")
    write_job(sweep, "b", PLANNED[1], "RUNNING")
    progress._check()
    write_job(sweep, "b", PLANNED[1])
    progress.stop()
    assert printed_lines(capsys)[1].endswith("12 s  18 s left")


def test_successive_jobs_do_not_count_as_concurrent(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    write_job(sweep, "a", PLANNED[0], "RUNNING")
    progress._check()
    write_job(sweep, "a", PLANNED[0])
    write_job(sweep, "b", PLANNED[1], "RUNNING")
    progress.stop()
    assert printed_lines(capsys)[1].endswith("12 s  36 s left")


def test_a_search_of_unknown_length_counts_its_jobs(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, [["lr=0.001"]], None)
    progress.start()
    write_job(sweep, "a", ["lr=0.00012345678"], objective=0.2134567, objective_name="eval/loss")
    progress.stop()
    lines = printed_lines(capsys)
    assert lines[0] == "sweep-lr-seed-mlp-digits in ."
    assert lines[1] == "  1  lr=0.0001235  eval loss 0.2135       12 s"


def test_a_terminal_has_cut_lines_and_a_last_line_with_the_running_job(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    reader, writer = pty.openpty()
    with open(writer, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        progress = SweepProgress(sweep, PLANNED, 4)
        progress.start()
        write_job(sweep, "a", PLANNED[0], "RUNNING")
        (sweep.folder / "a" / "console.log").write_text("epoch 1/3\nepoch 2/3  |  train loss 0.5\n")
        progress._check()
        last_line = progress._draw().plain
        write_job(sweep, "b", PLANNED[1], "FAILED", error={"message": "RuntimeError: " + 100 * "long "})
        progress.stop()
        terminal.flush()
        output = b""
        while "…".encode() not in output.partition(b"FAILED")[2]:  # a read returns what the terminal has so far
            output += os.read(reader, 65536)
        text = output.decode(errors="replace")
    assert last_line.startswith("0/4 done  ")
    assert last_line.endswith("running lr=0.01 seed=0  epoch 2/3  |  train loss 0.5")
    (line,) = (line for line in text.splitlines() if "FAILED" in line)
    assert len(line[line.index("1/4") :]) == 60 and line.endswith("…")


def test_a_thread_watches_the_folder(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    write_job(sweep, "a", PLANNED[0])
    wait_until(lambda: bool(progress._ended))
    progress.stop()
    assert INTERVAL < 1 and len(printed_lines(capsys)) == 2
