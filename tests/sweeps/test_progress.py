"""The lines that a sweep prints while its jobs run, from what their folders hold."""

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


def leave(sweep: Sweep, folder: str, overrides: list[str], status: str = "FINISHED", **facts: Any) -> None:
    """Write what a job leaves."""
    (sweep.folder / folder).mkdir(exist_ok=True)
    facts = {"objective": 0.98243, "objective_name": "eval/MulticlassAccuracy", "seconds": 12.0} | facts
    Result(status, folder, "id", [*overrides, "model=mlp"], **facts).write(sweep.folder / folder)
    if status != "REFUSED":
        claim(sweep.folder, sweep.key_of_job(overrides), sweep.folder / folder, "id")


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_each_job_that_ends_is_a_line(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    leave(sweep, "a", PLANNED[0], "RUNNING")
    progress._check()
    leave(sweep, "a", PLANNED[0])
    progress._check()
    leave(sweep, "b", PLANNED[1], "FAILED", error={"message": "RuntimeError: https://u:secret@host failed"})
    progress._check()
    leave(sweep, "c", PLANNED[2], "DIVERGED", objective=math.nan, seconds=6.0)
    progress._check()
    leave(sweep, ".refused-3", PLANNED[3], "REFUSED", error={"message": "data: no images\n  more"})
    progress.stop()
    progress._check()
    lines = printed(capsys)
    assert lines[0] == "sweep-lr-seed-mlp-digits: 4 jobs in ."
    assert lines[1] == "1/4  lr=0.01 seed=0  eval 0.9824      12 s  36 s left"
    assert lines[2].startswith("2/4  lr=0.01 seed=1  FAILED          12 s  RuntimeError: https://")
    assert "secret" not in lines[2]
    assert lines[3] == "3/4  lr=0.3 seed=0   DIVERGED       6.0 s  10 s left"
    assert lines[4] == "4/4  lr=0.3 seed=1   REFUSED     data: no images"
    assert len(lines) == 5


def test_what_an_earlier_command_finished_is_skipped_and_what_it_left_is_awaited(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
):
    leave(sweep, "a", PLANNED[0])
    leave(sweep, "b", PLANNED[1], "FAILED", error={"message": "RuntimeError: before"})
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    progress._check()
    lines = printed(capsys)
    assert lines[1:] == [
        "1/4  lr=0.01 seed=0  eval 0.9824  skipped: it has already ended",
        "--afresh trains these again, in a new sweep",
    ]
    leave(sweep, "b", PLANNED[1], seconds=20.0)
    progress.stop()
    assert printed(capsys) == ["2/4  lr=0.01 seed=1  eval 0.9824      20 s  40 s left"]


def test_jobs_at_the_same_time_share_what_is_left(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    leave(sweep, "a", PLANNED[0], "RUNNING")
    leave(sweep, "b", PLANNED[1], "RUNNING")
    progress._check()
    leave(sweep, "b", PLANNED[1])
    progress.stop()
    assert printed(capsys)[1].endswith("12 s  18 s left")


def test_a_job_that_follows_at_once_is_not_a_second_one_at_a_time(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    leave(sweep, "a", PLANNED[0], "RUNNING")
    progress._check()
    leave(sweep, "a", PLANNED[0])
    leave(sweep, "b", PLANNED[1], "RUNNING")
    progress.stop()
    assert printed(capsys)[1].endswith("12 s  36 s left")


def test_a_loss_is_named_and_a_search_without_an_end_counts(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, [["lr=0.001"]], None)
    progress.start()
    leave(sweep, "a", ["lr=0.00012345678"], objective=0.2134567, objective_name="eval/loss")
    progress.stop()
    lines = printed(capsys)
    assert lines[0] == "sweep-lr-seed-mlp-digits in ."
    assert lines[1] == "  1  lr=0.0001235  eval loss 0.2135       12 s"


def test_a_terminal_has_no_line_that_wraps_and_a_last_line_that_goes(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        progress = SweepProgress(sweep, PLANNED, 4)
        progress.start()
        leave(sweep, "a", PLANNED[0], "RUNNING")
        (sweep.folder / "a" / "console.log").write_text("epoch 1/3\nepoch 2/3  |  train loss 0.5\n")
        progress._check()
        shown = progress._draw().plain
        leave(sweep, "b", PLANNED[1], "FAILED", error={"message": "RuntimeError: " + 100 * "long "})
        progress.stop()
        terminal.flush()
        read = b""
        while "…".encode() not in read.partition(b"FAILED")[2]:  # a terminal hands over what it has so far
            read += os.read(ours, 65536)
        text = read.decode(errors="replace")
    assert shown.startswith("0/4 done  ") and shown.endswith("running lr=0.01 seed=0  epoch 2/3  |  train loss 0.5")
    (line,) = (one for one in text.splitlines() if "FAILED" in one)
    assert len(line[line.index("1/4") :]) == 60 and line.endswith("…")


def test_the_folder_is_watched_by_a_thread(sweep: Sweep, capsys: pytest.CaptureFixture[str]):
    progress = SweepProgress(sweep, PLANNED, 4)
    progress.start()
    leave(sweep, "a", PLANNED[0])
    wait_until(lambda: bool(progress._ended))
    progress.stop()
    assert INTERVAL < 1 and len(printed(capsys)) == 2
