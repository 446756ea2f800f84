"""`runner sync`: values that did not reach MLflow during training are sent later, once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import stores
from python_process import processes_in, run_python, wait_until

SHORT = ("trainer.max_duration=1ep", "model=mlp", "data.batch_size=400", "data.eval_batch_size=300")
LOGGED = (*SHORT, "callbacks=[mlflow_logger]")

# The process that sends values exits at once, so that all of them stay on disk.
UNSENT = """
from runner.callbacks._mlflow import writer_process
from runner.__main__ import command

writer_process._PROGRAM = "pass"
command()
"""


def train_unsent(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train with a writer that never sends."""
    return run_python(["-c", UNSENT, *LOGGED, *arguments], cwd=folder, check=True)


def query(folder: Path, sql: str) -> list[Any]:
    return stores.query(folder / "outputs" / "mlflow.db", sql)


@pytest.mark.slow
def test_unsent_values_are_sent_once(tmp_path: Path, run_app: Any):
    for name in "ab":
        assert "python -m runner sync " in train_unsent(tmp_path, f"hydra.run.dir={name}").stderr
    register = tmp_path / "outputs" / ".mlflow_unsent"
    assert len(list(register.iterdir())) == 2

    with_progress = "from runner.callbacks._mlflow import senders; senders.INTERVAL = -1.0\n"
    program = with_progress + "from runner.__main__ import command; command()"
    finished = run_python(["-c", program, "sync", "b"], cwd=tmp_path, check=True)
    assert finished.stdout == "b: everything is in MLflow\n"
    assert finished.stderr.splitlines()[-1] == "b: 100% sent"
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    assert run_app("sync").stdout == "a: everything is in MLflow\n"
    (register / "entry").write_text(str(tmp_path / "a run whose folder was removed"))
    assert run_app("sync").stdout == "MLflow: nothing left to send\n"
    run_app("sync", "a")  # a second time: no value is duplicated
    assert query(tmp_path, "select status from runs") == [("FINISHED",)] * 2
    counts = query(tmp_path, "select run_uuid, count(*) from metrics where key = 'loss/train/total' group by run_uuid")
    assert [count for _, count in counts] == [3, 3]
    assert list(register.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "outputs"}
    assert list((tmp_path / "outputs").glob("20*")) == []


@pytest.mark.slow
def test_an_unreachable_server_is_exit_code_1(tmp_path: Path, run_app: Any, free_port: int):
    address = f"callbacks.mlflow_logger.tracking_uri=http://127.0.0.1:{free_port}"
    run_app(*LOGGED, address, "callbacks.mlflow_logger.close_timeout=0", "hydra.run.dir=a")
    wait_until(lambda: not processes_in(tmp_path))  # the writer retries for a while
    finished = run_app("sync", "a", exit_code=1)
    assert finished.stdout == "a: not everything is in MLflow\n"
    assert "127.0.0.1" in finished.stderr and "Traceback" not in finished.stderr
    assert json.loads((tmp_path / "a" / "mlflow" / "run.json").read_text())["tracking_uri"].endswith(str(free_port))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("missing",), "missing': nothing was logged to MLflow there"),
        ((".",), "nothing was logged to MLflow there; give a run's folder"),
        (("callbacks=none",), "sync: no callback here keeps unsent values; it needs callbacks.mlflow_logger"),
        (("a", "b"), "sync: takes [RUN], not a b"),
    ],
)
def test_a_folder_with_nothing_to_send_is_refused_in_one_message(
    tmp_path: Path, run_here: Any, arguments: tuple[str, ...], part: str
):
    error = run_here("sync", *arguments, code=2).err
    assert part in error and error.count("error: ") == 1 and len(error.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == []
