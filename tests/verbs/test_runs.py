"""`runner runs`: lists finished, running, broken and malicious runs, filtered and sorted."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from many_runs import write_many, write_run
from python_process import PATIENCE

from runner.files.lock import lock_file


@pytest.fixture
def three_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three runs, one of them a job of a sweep."""
    monkeypatch.setenv("COLUMNS", "80")
    day = tmp_path / "outputs" / "2026-11-23"
    write_run(day / "09-00-00", loss=0.25, started=1.7e9)
    write_run(day / "10-00-00", loss=0.125, started=1.7e9 + 3600, lr=0.03, seconds=4000.0)
    write_run(tmp_path / "outputs" / "sweeps" / "2026-11-23" / "11-00-00" / "lr0.1", model="mlp", started=1.8e9)
    return tmp_path


def test_a_narrow_terminal_names_the_columns_that_a_pipe_shows(
    three_runs: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
):
    overrides = [
        *("~callbacks.progress_bar", "+callbacks=ema", "optimizer.weight_decay=0.00012345678"),
        *("data.batch_size=123456", "data.eval_batch_size=99"),
    ]
    write_run(three_runs / "outputs" / "2026-11-24" / "12-00-00", started=1.9e9, overrides=overrides)
    shown = "~progress_bar +callbacks=ema weight_decay=0.00012345678 batch_size=123456 eval_batch_size=99"
    monkeypatch.delenv("COLUMNS")
    assert f"12 s  {shown}\n" in run_here("runs", code=0).out
    monkeypatch.setenv("COLUMNS", "44")
    last_line = run_here("runs", code=0).out.splitlines()[-1]
    assert last_line == "no room for eval/loss, time, typed; --format csv shows all"


def test_a_metric_is_found_by_its_short_and_its_logged_name(three_runs: Path, run_here: Any):
    runs = in_json(run_here, "eval/loss<0.3", "--sort=-MulticlassAccuracy")
    assert in_json(run_here, "loss/eval/total<0.3", "--sort", "-metrics/eval/MulticlassAccuracy") == runs
    assert len(runs) == 2


def test_tables_fit_eighty_and_sixty_columns(three_runs: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch):
    assert (
        run_here("runs", code=0).out
        == """\
3 runs in outputs/, all finished
                                       eval/
                                  Multiclass
run                                 Accuracy  eval/loss    time  typed
sweeps/2026-11-23/11-00-00/lr0.1         0.5        0.5    12 s  lr=0.1
2026-11-23/10-00-00                    0.875      0.125  67 min  lr=0.03
2026-11-23/09-00-00                     0.75       0.25    12 s  lr=0.1
"""
    )
    assert (
        run_here("runs", "eval/loss<0.3", "--limit=1", code=0).out
        == """\
2 of 3 runs in outputs/, all finished
                                     eval/
                                Multiclass
run                  eval/loss    Accuracy    time  typed
2026-11-23/10-00-00      0.125       0.875  67 min  lr=0.03 seed=0
and 1 more; --limit 0 shows all
"""
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        run_here("runs", "--limit=1", code=0).out
        == """\
3 runs in outputs/, all finished
                                     eval/
                                Multiclass
run                               Accuracy  typed
…eps/2026-11-23/11-00-00/lr0.1         0.5  lr=0.1 seed=0
no room for eval/loss, time; --format csv shows all
and 2 more; --limit 0 shows all
"""
    )


def in_json(run_here: Any, *typed: str) -> list[dict[str, Any]]:
    """Return the runs that `runs --json` lists."""
    return json.loads(run_here("runs", *typed, "--json", code=0).out)["result"]["runs"]


def folders(text: str) -> list[str]:
    """Return the names of the folders in a table or in JSON."""
    if text.startswith("{"):
        return [Path(run["folder"]).name for run in json.loads(text)["result"]["runs"]]
    return [line.split()[0].rpartition("/")[2] for line in text.splitlines() if "2026-11-23/" in line]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], ["lr0.1", "10-00-00", "09-00-00"]),  # the newest first
        (["eval/loss<0.3"], ["10-00-00", "09-00-00"]),
        (["loss<0.3", "optimizer.lr>=0.1"], ["09-00-00"]),
        (["eval/loss<0.3 optimizer.lr!=0.1"], ["10-00-00"]),
        (["model='mlp'"], ["lr0.1"]),
        (["model=res*"], ["10-00-00", "09-00-00"]),
        (["callbacks=lr_monitor", "optimizer.betas=0.95", "seed=0"], ["lr0.1", "10-00-00", "09-00-00"]),
        (["model.module.width>16"], []),
        (["--sort=eval/loss"], ["10-00-00", "09-00-00", "lr0.1"]),
        (["--sort", "-seconds", "--limit", "1"], ["10-00-00"]),
        (["--limit", "1", "eval/loss<0.3", "--sort=eval/loss", "seed=0"], ["10-00-00"]),
        (["name=lr0.1"], ["lr0.1"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["--format=table", "--json"])
def test_runs_are_filtered_and_sorted(
    three_runs: Path, run_here: Any, typed: list[str], expected: list[str], form: str
):
    assert folders(run_here("runs", *typed, form, code=0).out) == expected


def test_the_title_states_the_status_of_all_runs_not_only_of_those_shown(tmp_path: Path, run_here: Any):
    for number, status in enumerate(("FAILED", "FINISHED")):
        write_run(tmp_path / "outputs" / status, status=status, started=1.0 + number)
    title, *table, last = run_here("runs", "--limit=1", code=0).out.splitlines()
    assert title == "2 runs in outputs/" and "finished" in table[-1] and last == "and 1 more; --limit 0 shows all"


def test_csv_has_a_column_for_each_metric_and_group(three_runs: Path, run_here: Any):
    rows = [*csv.DictReader(io.StringIO(run_here("runs", "--format=csv", code=0).out))]
    assert [row["eval/loss"] for row in rows] == ["0.5", "0.125", "0.25"]
    assert rows[0]["model"] == "mlp" and rows[0]["overrides"] == "optimizer.lr=0.1 seed=0"
    assert rows[1]["started"] == "2023-11-14T23:13:20+00:00"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["evl/loss<3"], "CONDITION='evl/loss<3': no run has a value of this name; did you mean 'eval/loss'?"),
        (["lr=0.1"], "CONDITION='lr=0.1': no run has a value of this name; write optimizer.lr"),
        (["--sort=los"], "--sort='los': no run has a value of this name"),
        (["eval/loss<small"], "CONDITION='eval/loss<small': < compares numbers"),
        (["eval/loss"], "CONDITION='eval/loss': must be name, sign and value without spaces"),
        (["name='a"], 'CONDITION="name=\'a": No closing quotation'),
        (["--format=xml"], "--format='xml': allowed: csv, table"),
        (["--limit=-1"], "--limit=-1: must be a number of runs, or 0 for all"),
        (["--limit", "all"], "--limit='all': must be a whole number"),
        (["--limi", "3"], "--limi: runs has no such option; did you mean --limit? Allowed: --sort, --format, --limit"),
        (["runs.limit=3"], "runs.limit=3: no such key; write runner runs --limit 3"),
        (["limit=3"], "CONDITION='limit=3': no run has a value of this name"),
        (["-m"], "-m: runs composes no config"),
    ],
    ids=str,
)
def test_a_wrong_condition_or_option_is_refused_in_one_line(
    three_runs: Path, run_here: Any, typed: list[str], message: str
):
    _, out, err = run_here("runs", *typed, code=2)
    assert err.startswith(f"error: {message}") and err.count("\n") == 1 and out == ""


def test_only_a_locked_run_is_listed_as_running(tmp_path: Path, run_here: Any):
    cut = write_run(tmp_path / "outputs" / "cut", status="RUNNING")
    (cut / ".lock").touch()
    write_run(tmp_path / "outputs" / "never", status="RUNNING")
    busy = write_run(tmp_path / "outputs" / "busy", status="RUNNING")
    program = """
import pathlib, sys
from runner.files.lock import lock_file
lock = lock_file(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
input()
"""
    command = [sys.executable, "-c", program, str(busy / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "locked\n"
        listed = in_json(run_here, "--limit=0")
        process.stdin.write("\n")
        process.stdin.flush()
    assert {run["name"]: run["status"] for run in listed} == {"cut": "cut off", "never": "cut off", "busy": "running"}
    lock = lock_file(cut / ".lock")
    assert lock is not None  # `runs` does not keep the lock
    lock.close()


def test_malicious_runs_are_read_as_data(tmp_path: Path, run_here: Any):
    outputs = tmp_path / "outputs"
    good = write_run(outputs / "good")
    names = ["torn", "list", "deep", "types", "large", "pipe", "link", "huge", "folder"]
    for name in names:
        (outputs / name).mkdir()
    result = json.loads((good / "result.json").read_text())
    (outputs / "torn" / "result.json").write_text('{"status": "FIN')
    (outputs / "list" / "result.json").write_text("[1]")
    (outputs / "deep" / "result.json").write_text("[" * 100_000)
    (outputs / "types" / "result.json").write_text(json.dumps(result | {"status": ["FINISHED"], "name": {}}))
    with (outputs / "large" / "result.json").open("wb") as file:
        file.truncate(10**11)
    os.mkfifo(outputs / "pipe" / "result.json")
    (outputs / "link" / "result.json").symlink_to("/dev/zero")
    (outputs / "huge" / "result.json").write_text(json.dumps(result | {"metrics": {"eval/loss": 10**400}}))
    (outputs / "folder" / "result.json").mkdir()
    (outputs / "refused" / ".refused-3").mkdir(parents=True)
    (outputs / "refused" / ".refused-3" / "result.json").write_text("{}")
    evil = outputs / "a\x1b[2J\nb\u202e"
    write_run(evil, name="\x1b]0;owned\x07", status="\x1b[31mFINE", overrides=["a=\r\x1b[K", "b=" + "x" * 10_000])
    (evil / "config.yaml").write_text("a: &a [1, 1]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(9)))
    bomb = write_run(outputs / "bomb")
    levels = "".join(f"\n- &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9))
    (bomb / "config.yaml").write_text(f"seed:\n- &a0 [x, x]{levels}\n")
    text = write_run(outputs / "text")
    (text / "config.yaml").write_text("seed:1\n")
    loop = write_run(outputs / "loop")
    (loop / "config.yaml").write_text("seed: &a\n  _: *a\n")
    start = time.process_time()
    for form in ("table", "csv"):
        out = run_here("runs", "seed!=1", "--limit=0", f"--format={form}", code=0).out
        assert out.isascii() or form == "table"
        assert all(character.isprintable() or character == "\n" for character in out)
        assert max(map(len, out.splitlines())) < 200 or form != "table"
    assert time.process_time() - start < 20
    listed = in_json(run_here, "--limit=0")
    status = {Path(run["folder"]).name: run["status"] for run in listed}
    assert {status[name] for name in names} == {"unreadable"} and status["good"] == "finished"
    assert len(listed) == len(names) + 5


def test_a_thousand_runs_take_less_than_a_second_and_a_half(tmp_path: Path):
    """This is CPU time of the whole process, without torch, MLflow and Hydra; `benchmarks/runs.py` has more runs."""
    write_many(tmp_path / "outputs", 1000)
    program = """
import sys, time
from runner.__main__ import main
sys.argv = ["runner", *sys.argv[1:]]
assert main() == 0
print({"torch", "mlflow", "hydra", "rich"} & set(sys.modules), time.process_time())
"""
    command = [sys.executable, "-c", program, "runs", "eval/loss<0.5 model=resnet8", "--sort=eval/loss"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert " of 1,000 runs in outputs/, all finished\n" in finished.stdout
    imported, seconds = finished.stdout.splitlines()[-1].rsplit(" ", 1)
    assert imported == "set()" and float(seconds) < 1.5


def test_a_folder_without_runs_is_an_empty_list(tmp_path: Path, run_here: Any):
    assert run_here("runs", code=0).out == "0 runs in outputs/\n"
    assert in_json(run_here, "eval/loss<1") == []
    assert list(tmp_path.iterdir()) == []
