"""Processes of writers and trainers that are killed, idle, concurrent, or started next to another `runner` module."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from made_once import MAKE_STORES
from mlflow_runs import log_steps, logging_to, points, query
from python_process import PATIENCE, start_python, wait_until

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow import writer_process
from runner.callbacks._mlflow.spool import Spool
from runner.callbacks._mlflow.target import make_target, read_identity, unsent_entry, write_target
from runner.callbacks._mlflow.writer_process import shared_writer
from runner.files.whole import read_object, write_atomically

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, signal, sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests/support", {tests!r}]
from runner.callbacks import MLflowLogger
MLflowLogger.warm_up()
from runner.callbacks._mlflow.writer_process import shared_writer
from mlflow_runs import log_steps, make_state
from python_process import wait_until
from runner import Logger
destination = MLflowLogger()
state = make_state(sys.argv[1])
logger = Logger(state, [destination])
destination.init(state, logger)
log_steps(state, logger, range(1, 26))
if "kill" in sys.argv and "kill-writer" not in sys.argv:  # starting the writer would take up its last seconds
    logger.flush()
    wait_until(lambda: destination.run_id)
log_steps(state, logger, range(26, 51))
logger.flush()
if "kill-writer" in sys.argv:
    os.kill(shared_writer().pid, signal.SIGKILL)
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
destination.close(state, logger)
destination.post_close()
logger.close()
"""


def start_child(*arguments: str, real: bool = False) -> tuple[Any, Path]:
    program = CHILD.format(root=str(ROOT), tests=str(Path(__file__).parent))
    with open(f"errors-{uuid.uuid4().hex}", "wb") as errors:
        return start_python(["-c", program, *arguments], real=real, stderr=errors), Path(errors.name)


def finish_child(child: tuple[Any, Path], code: int) -> None:
    process, errors = child
    assert process.wait(PATIENCE) == code, errors.read_text()


def test_a_killed_writer_is_replaced_and_no_value_is_stored_twice(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 200))
        wait_until(lambda: len(points("loss")) == 199)
        os.kill(shared_writer().pid, signal.SIGKILL)
        # As if it had been killed after MLflow had stored the points, but before it recorded this.
        wait_until(lambda: any("ended unexpectedly" in record.message for record in caplog.records))
        sent = read_object(folder / "r" / "mlflow" / "sent.json")
        write_atomically(folder / "r" / "mlflow" / "sent.json", json.dumps(sent | {"offset": 0}))
        log_steps(state, logger, range(200, 251))
    assert points("loss") == [(step, float(step)) for step in range(1, 251)]
    assert query("select status from runs") == [("FINISHED",)]
    assert len(caplog.records) == 1


def test_the_writer_has_a_lower_priority_and_does_not_receive_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "subprocess", subprocess)  # a new interpreter instead of a forked process
    writer = writer_process.WriterProcess()
    try:
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, writer.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 5)
        assert os.getsid(writer.pid) == os.getsid(0)  # priorities are compared only within a session
        assert os.getpgid(writer.pid) == writer.pid
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        wait_until(lambda: not writer.is_alive)


def test_a_killed_trainer_leaves_a_failed_run_with_all_its_points(folder: Path) -> None:
    finish_child(start_child("r", "kill"), -signal.SIGKILL)
    wait_until(lambda: query("select status from runs") == [("FAILED",)])
    assert points("loss") == [(step, float(step)) for step in range(1, 51)]


def test_the_entry_of_a_run_sent_from_elsewhere_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to(MLflowLogger(), "outputs/a"):
        pass
    writer = shared_writer()
    os.kill(writer.pid, signal.SIGKILL)  # it remembers that the run was sent
    wait_until(lambda: not writer.is_alive)
    other = folder / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    entry = unsent_entry(folder / "outputs" / "a", str(other))
    write_atomically(entry, str(folder / "outputs" / "a"))
    with logging_to(MLflowLogger(f"sqlite:///{folder}/outputs/mlflow.db"), "outputs/b"):
        pass
    wait_until(lambda: not entry.exists())


def test_a_run_keeps_its_identity_if_killed_before_the_first_line_of_its_spool(tmp_path: Path) -> None:
    fields = {"tracking_uri": "sqlite:///mlflow.db", "by_key": True, "experiment_name": "e", "run_name": "r"}
    target = make_target(fields, {}, ["train"])
    assert read_identity(tmp_path) == {}
    spool = Spool(tmp_path)
    write_target(tmp_path, target)
    spool.append({"status": "FAILED", "t": 1})
    spool.close()
    assert read_identity(tmp_path) == {key: target[key] for key in ("spool", "start_time", "run_name")}


@pytest.mark.slow
def test_unsent_data_is_sent_by_the_next_run_or_by_runner_sync(folder: Path, run_app: Any) -> None:
    for child in [start_child("outputs/a", "kill", "kill-writer"), start_child("outputs/b", "kill", "kill-writer")]:
        finish_child(child, -signal.SIGKILL)
    assert len(list((folder / "outputs" / ".mlflow_unsent").iterdir())) == 2
    finished = run_app("sync", "outputs/a")
    assert "outputs/a: everything is in MLflow\n" in finished.stdout
    assert query("select status from runs") == [("FAILED",)]
    with logging_to(MLflowLogger(), "outputs/c"):
        pass
    wait_until(lambda: not list((folder / "outputs" / ".mlflow_unsent").iterdir()))
    assert sorted(query("select status from runs")) == [("FAILED",), ("FAILED",), ("FINISHED",)]
    assert points("loss") == sorted((step, float(step)) for step in [*range(1, 51)] * 2)


@pytest.mark.slow
def test_four_processes_that_start_together_create_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MAKE_STORES, "1")
    for child in [start_child(f"outputs/{name}") for name in "abcd"]:
        finish_child(child, 0)
    assert query("select status from runs") == [("FINISHED",)] * 4
    assert query("select count(*) from experiments where name = 'runner'") == [(1,)]
    assert points("loss") == sorted((step, float(step)) for step in [*range(1, 51)] * 4)


@pytest.mark.slow
def test_an_unused_writer_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r});"
        "from runner.callbacks import MLflowLogger; MLflowLogger.warm_up();"
        "from runner.callbacks._mlflow.writer_process import shared_writer; print(shared_writer().pid);"
        "print(*{'torch', 'mlflow'} & {*sys.modules})"
    )
    finished = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    pid, imported = finished.stdout.splitlines()
    assert (finished.returncode, finished.stderr, imported) == (0, "", "")
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert not list(tmp_path.iterdir())


def test_the_writer_modules_import_neither_torch_nor_mlflow() -> None:
    program = (
        "import sys; from runner.callbacks._mlflow import senders, session, writer_process;"
        "print(*{'torch', 'mlflow'} & {*sys.modules})"
    )
    finished = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout.split() == []


@pytest.mark.slow
def test_the_writer_does_not_import_a_runner_module_of_the_user(folder: Path) -> None:
    (folder / "runner.py").write_text("raise RuntimeError('the wrong package')")
    finish_child(start_child("r", real=True), 0)
    assert query("select status from runs") == [("FINISHED",)]
