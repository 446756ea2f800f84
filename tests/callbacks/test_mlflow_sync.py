"""`runner sync` sends unsent data to the right store, and reports the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stores
from mlflow_runs import change, log_steps, logging_to, points

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow import session
from runner.files.whole import read_object

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and what it imports, which else lives in the writer


def log_unsent(run_dir: str, *arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log three steps on a machine that cannot start the process that sends them."""

    def fail() -> None:
        raise OSError("no process can be started")

    with monkeypatch.context() as context:
        context.setattr(session, "shared_writer", fail)
        with logging_to(MLflowLogger(*arguments), run_dir) as (state, logger):
            log_steps(state, logger, range(1, 4))


def test_data_of_a_deleted_experiment_are_sent_after_it_is_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(MLflowLogger(), "first"):
        pass
    change("update experiments set lifecycle_stage = 'deleted' where name = 'runner'")
    log_unsent("r", monkeypatch=monkeypatch)
    assert not MLflowLogger().sync(None)
    said = capsys.readouterr()
    assert said.out == "r: MLflow has not all of it\n" and "the experiment 'runner' is deleted there" in said.err
    change("update experiments set lifecycle_stage = 'active' where name = 'runner'")
    assert MLflowLogger().sync(None)
    assert capsys.readouterr().out == "r: MLflow has all of it\n"
    assert points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert MLflowLogger().sync(None) and capsys.readouterr().out == "MLflow: nothing left to send\n"


@pytest.mark.parametrize("how", ["key", "environment"])
def test_data_for_a_dead_server_are_sent_to_the_address_that_is_chosen(
    folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port}")
    log_unsent("r", monkeypatch=monkeypatch)
    address = f"sqlite:///{folder}/elsewhere/mlflow.db"
    (folder / "elsewhere").mkdir()
    (folder / "outputs" / "mlflow.db").rename(folder / "elsewhere" / "mlflow.db")
    if how == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    logger = MLflowLogger(address if how == "key" else None)
    assert logger.sync(None) and capsys.readouterr().out == "r: MLflow has all of it\n"
    sql = "select step, value from metrics where key = 'loss' order by step"
    assert stores.query(folder / "elsewhere" / "mlflow.db", sql) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert read_object(folder / "r" / "mlflow" / "run.json")["tracking_uri"] == address
    assert logger.sync(None) and capsys.readouterr().out == "MLflow: nothing left to send\n"


def test_the_environment_moves_no_run_whose_address_was_chosen_in_its_config(
    folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"http://127.0.0.1:{free_port}"
    log_unsent("outputs/r", own, monkeypatch=monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/outputs/mlflow.db")
    assert not MLflowLogger().sync(None)
    said = capsys.readouterr()
    assert said.out == "outputs/r: MLflow has not all of it\n" and own in said.err


def test_runs_of_another_store_are_left_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "outputs" / "mlflow.db").rename(folder / "elsewhere" / "mlflow.db")
    log_unsent("outputs/r", f"sqlite:///{folder}/elsewhere/mlflow.db", monkeypatch=monkeypatch)
    assert MLflowLogger().sync(None) and capsys.readouterr().out == "outputs/r: MLflow has all of it\n"
    assert stores.query(folder / "elsewhere" / "mlflow.db", "select status from runs") == [("FINISHED",)]


@pytest.mark.parametrize("name", ["a?b", "a%41b", "a#b c"])
def test_a_working_folder_of_any_name_holds_its_store(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    inside = folder / name
    inside.mkdir()
    (folder / "outputs").rename(inside / "outputs")
    monkeypatch.chdir(inside)
    (inside / "notes.txt").write_text("notes")
    logger = MLflowLogger()
    with logging_to(logger, "r") as (state, log):
        log_steps(state, log, range(1, 4))
        log.log_artifact(inside / "notes.txt", "notes")
    assert points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert logger.ui_command == "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db"
    assert [path.read_text() for path in (inside / "outputs" / "mlartifacts").rglob("notes.txt")] == ["notes"]
    assert list(folder.iterdir()) == [inside]


def test_what_a_killed_creation_of_a_store_left_is_removed_by_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [folder / "outputs" / f".mlflow.db.new{end}" for end in ("", "-journal")]
    for file in left:
        file.write_text("half a store")
    log_unsent("r", monkeypatch=monkeypatch)
    assert MLflowLogger().sync(None) and not any(file.exists() for file in left)
