"""`runner sync` sends unsent data to the right store, and reports runs that it cannot send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stores
from mlflow_runs import change, log_steps, logging_to, points

from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow import session
from runner.files.whole import read_object

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of MLflow, which otherwise only the writer imports


def log_unsent(run_dir: str, *arguments: Any) -> None:
    """Log three steps while the process that sends them cannot be started."""

    def fail() -> None:
        raise OSError("no process can be started")

    with pytest.MonkeyPatch.context() as context:
        context.setattr(session, "shared_writer", fail)
        with logging_to(MLflowLogger(*arguments), run_dir) as (state, logger):
            log_steps(state, logger, range(1, 4))


@pytest.mark.slow
def test_data_of_a_deleted_experiment_is_sent_after_it_is_restored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(MLflowLogger(), "first"):
        pass
    change("update experiments set lifecycle_stage = 'deleted' where name = 'runner'")
    log_unsent("r")
    assert not MLflowLogger().sync(None)
    output = capsys.readouterr()
    assert output.out == "r: not everything is in MLflow\n" and "the experiment 'runner' is deleted there" in output.err
    change("update experiments set lifecycle_stage = 'active' where name = 'runner'")
    assert MLflowLogger().sync(None)
    assert capsys.readouterr().out == "r: everything is in MLflow\n"
    assert points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert MLflowLogger().sync(None) and capsys.readouterr().out == "MLflow: nothing left to send\n"


@pytest.mark.parametrize("source", ["key", "environment"])
def test_data_for_a_missing_server_is_sent_to_the_newly_chosen_store(
    folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port}")
    log_unsent("r")
    address = f"sqlite:///{folder}/elsewhere/mlflow.db"
    (folder / "elsewhere").mkdir()
    (folder / "outputs" / "mlflow.db").rename(folder / "elsewhere" / "mlflow.db")
    if source == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    logger = MLflowLogger(address if source == "key" else None)
    assert logger.sync(None) and capsys.readouterr().out == "r: everything is in MLflow\n"
    sql = "select step, value from metrics where key = 'loss' order by step"
    assert stores.query(folder / "elsewhere" / "mlflow.db", sql) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert read_object(folder / "r" / "mlflow" / "run.json")["tracking_uri"] == address
    assert logger.sync(None) and capsys.readouterr().out == "MLflow: nothing left to send\n"


def test_the_environment_does_not_move_a_run_whose_config_names_its_store(
    folder: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"http://127.0.0.1:{free_port}"
    log_unsent("outputs/r", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/outputs/mlflow.db")
    assert not MLflowLogger().sync(None)
    output = capsys.readouterr()
    assert output.out == "outputs/r: not everything is in MLflow\n" and uri in output.err


def test_unsent_runs_of_another_store_are_sent_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "outputs" / "mlflow.db").rename(folder / "elsewhere" / "mlflow.db")
    log_unsent("outputs/r", f"sqlite:///{folder}/elsewhere/mlflow.db")
    assert MLflowLogger().sync(None) and capsys.readouterr().out == "outputs/r: everything is in MLflow\n"
    assert stores.query(folder / "elsewhere" / "mlflow.db", "select status from runs") == [("FINISHED",)]


@pytest.mark.parametrize("name", ["a?b", "a%41b", "a#b c"])
def test_the_working_directory_may_have_any_name(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    directory = folder / name
    directory.mkdir()
    (folder / "outputs").rename(directory / "outputs")
    monkeypatch.chdir(directory)
    (directory / "notes.txt").write_text("notes")
    logger = MLflowLogger()
    with logging_to(logger, "r") as (state, log):
        log_steps(state, log, range(1, 4))
        log.log_artifact(directory / "notes.txt", "notes")
    assert points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert logger.ui_command == "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db"
    assert [path.read_text() for path in (directory / "outputs" / "mlartifacts").rglob("notes.txt")] == ["notes"]
    assert list(folder.iterdir()) == [directory]


def test_files_of_an_interrupted_creation_of_a_store_are_removed(folder: Path) -> None:
    files = [folder / "outputs" / f".mlflow.db.new{end}" for end in ("", "-journal")]
    for file in files:
        file.write_text("half a store")
    log_unsent("r")
    assert MLflowLogger().sync(None) and not any(file.exists() for file in files)
