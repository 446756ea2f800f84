"""If the store, the server, the folder or the disk fails, training continues with one warning and keeps its data."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy.exc
from limited_files import limited_files
from mlflow_runs import log_steps, logging_to, points, query
from python_process import wait_until

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow.delivery import Delivery
from runner.callbacks._mlflow.spool import Spool, read_entries
from runner.callbacks._mlflow.target import make_target
from runner.callbacks._mlflow.writer_process import shared_writer
from runner.files.lock import lock_file
from runner.libraries.mlflow_failures import explain


def test_an_error_of_the_database_is_told_without_its_statement():
    error = sqlalchemy.exc.OperationalError("CREATE TABLE runs (many columns)", {}, OSError("disk is full"))
    assert explain(error, "sqlite:///mlflow.db") == "OperationalError: (builtins.OSError) disk is full"


def kill_writer() -> None:
    """Kill the writer, which would go on waiting for a silent server during the next tests."""
    writer = shared_writer()
    os.kill(writer.pid, signal.SIGKILL)
    wait_until(lambda: not writer.is_alive)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("http://127.0.0.1:{port}", "cannot be reached (Connection refused)"),
        ("sqlite:///file/mlflow.db", "file"),
    ],
)
def test_training_continues_without_a_working_store(
    uri: str,
    reason: str,
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("not a folder")
    started = time.monotonic()
    with logging_to(MLflowLogger(uri.format(port=free_port), close_timeout=300), "r") as (state, logger):
        log_steps(state, logger, range(1, 11))
    assert time.monotonic() - started < 250  # it does not wait for what cannot succeed
    [record] = caplog.records
    assert (record.name, record.levelno) == ("runner", logging.WARNING)
    assert reason in record.message and f"runner sync {tmp_path / 'r'}" in record.message
    assert sum("m" in (entry or {}) for entry, _ in read_entries(Path("r/mlflow/spool.jsonl"))) == 10


def test_close_timeout_limits_the_wait_for_a_silent_server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts connections and never answers
        destination = MLflowLogger(f"http://127.0.0.1:{server.getsockname()[1]}", close_timeout=1.5)
        with logging_to(destination, "r") as (state, logger):
            log_steps(state, logger, range(1, 11))
            started = time.monotonic()
        assert 1.4 < time.monotonic() - started < 45  # by default it waits for a minute
    assert capsys.readouterr().err == ""  # no message about so short a wait
    [record] = caplog.records
    assert record.levelname == "WARNING" and "0% of what was logged had arrived when the run ended" in record.message
    assert sum("m" in (entry or {}) for entry, _ in read_entries(Path("r/mlflow/spool.jsonl"))) == 10
    kill_writer()


@pytest.mark.slow
def test_a_silent_server_does_not_delay_other_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(2):  # the second session does not wait until the first one's data is sent
            with logging_to(MLflowLogger(f"http://127.0.0.1:{server.getsockname()[1]}", close_timeout=0), "silent"):
                pass
        started = time.monotonic()
        with logging_to(MLflowLogger(), "r") as (state, logger):
            log_steps(state, logger, range(1, 4))
        assert time.monotonic() - started < 250  # a call to that server waits for 300 s
        kill_writer()
    assert points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)] and query("select status from runs") == [("FINISHED",)]


class FullDisk(io.StringIO):
    """A log file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_delivery_whose_log_cannot_be_written_reports_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    fields = {"tracking_uri": f"sqlite:///{tmp_path}/file/mlflow.db", "by_key": True, "experiment_name": "e"}
    target = make_target({**fields, "run_name": "r"}, {}, ["train"])
    spool = Spool(tmp_path / "mlflow")
    spool.append({"start": target["start_time"], "spool": target["spool"], "name": "r"})
    spool.close()
    reports: list[dict[str, Any]] = []
    delivery = Delivery(tmp_path, target, reports.append, live=False)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", FullDisk())
        assert not delivery.run()
    assert ["error" in report for report in reports] == [True, False] and delivery.stopped.is_set()
    assert reports[-1] == {"stopped": True, "complete": False}
    lock = lock_file(tmp_path / "mlflow" / "writer.lock")
    assert lock is not None, "the delivery still holds the lock"
    lock.close()


def test_a_run_folder_that_cannot_be_written_gives_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "r").write_text("not a folder")
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
        logger.log_table(["a"], [[1]], "t")
    assert [record.message.partition(",")[0] for record in caplog.records] == ["MLflow: this run is not recorded"]


def test_a_spool_continues_after_a_full_disk_and_an_incomplete_line(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"tags": {}})
    with limited_files(30), pytest.raises(OSError, match="could be written"):
        spool.append({"tags": {"a long key": "a long value"}})
    spool.append({"tags": {"after": 1}})
    assert spool.size == spool.path.stat().st_size
    spool.close()
    entries = [entry for entry, _ in read_entries(spool.path)]
    assert entries == [{"tags": {}}, None, {"tags": {"after": 1}}]
    with spool.path.open("a") as file:
        file.write('{"tags": {"cut')
    reopened = Spool(tmp_path)
    reopened.append({"tags": {"resumed": 1}})
    reopened.close()
    assert [entry for entry, _ in read_entries(reopened.path)][3:] == [None, {"tags": {"resumed": 1}}]
