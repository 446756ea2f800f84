"""Resumed runs continue their MLflow run and store; a batch with the same loss appears once."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow_runs import change, log_steps, logging_to, points, query
from python_process import wait_until

from runner import Timestamp
from runner.callbacks import MLflowLogger
from runner.callbacks._mlflow.spool import Sent, read_sent, write_sent
from runner.callbacks._mlflow.target import is_copy, write_target
from runner.files.whole import read_object


def test_a_resumed_run_continues_the_same_mlflow_run(folder: Path) -> None:
    first = MLflowLogger()
    with logging_to(first, "r", config={"lr": 0.1, "kept": 1}) as (state, logger):
        log_steps(state, logger, range(1, 11), value=1.0)
    second = MLflowLogger()
    with logging_to(second, "r", config={"lr": 0.2, "kept": 1}) as (state, logger):
        log_steps(state, logger, range(6, 16), value=2.0)
        wait_until(lambda: query("select status from runs") == [("RUNNING",)])
        assert second.run_id == first.run_id
        logger.log_metrics({"other": 3.0}, step=8)  # a new key at an old step
    assert points("loss") == [(step, 1.0) for step in range(1, 11)] + [(step, 2.0) for step in range(11, 16)]
    assert points("other") == [(8, 3.0)]
    assert query("select status from runs") == [("FINISHED",)]
    assert dict(query("select key, value from params")) == {"lr": "0.1", "kept": "1"}
    assert query("select key, value from tags where key like 'param_%'") == [("param_changed.lr", "0.2")]


@pytest.mark.parametrize("how", ["copied", "moved", "linked", "copied without mlflow"])
def test_a_copied_run_that_is_resumed_says_that_both_write_to_one_mlflow_run(
    folder: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    first = MLflowLogger()
    with logging_to(first, "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
        logger.flush()
        saved = first.state_dict()
    if how == "linked":
        (folder / "s").symlink_to("r")
    elif how == "moved":
        (folder / "r").rename(folder / "s")
    else:
        shutil.copytree(folder / "r", folder / "s")
    if how == "copied without mlflow":
        shutil.rmtree(folder / "s" / "mlflow")
    with logging_to(MLflowLogger(), "s", saved) as (state, logger):
        log_steps(state, logger, range(3, 5))
    warned = [text for text in caplog.messages if f"MLflow: {folder / 's'} is a copy of {folder / 'r'}, so" in text]
    assert len(warned) == (how == "copied")
    assert len(query("select * from runs")) == (2 if how == "copied without mlflow" else 1)


def test_a_run_from_a_folder_that_cannot_be_read_is_no_copy(folder: Path) -> None:
    assert not is_copy(folder, folder / ("long" * 100))  # an OSError, as for a folder of another user


def test_a_resumed_run_continues_in_a_renamed_experiment(folder: Path) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
    change("update experiments set name = 'better' where name = 'runner'")
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(3, 5))
    assert points("loss") == [(step, float(step)) for step in range(1, 5)]
    assert sorted(query("select name from experiments")) == [("Default",), ("better",)]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_deleted_experiment_is_reported_and_gets_its_data_later(folder: Path, resumed: bool, caplog: Any) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
    change("update experiments set lifecycle_stage = 'deleted' where name = 'runner'")
    with logging_to(MLflowLogger(close_timeout=10), "r" if resumed else "other") as (state, logger):
        log_steps(state, logger, range(3, 5))
    assert "the experiment 'runner' is deleted there; restore it in the UI (`mlflow experiments restore" in caplog.text
    assert points("loss") == [(1, 1.0), (2, 2.0)]
    change("update experiments set lifecycle_stage = 'active' where name = 'runner'")
    with logging_to(MLflowLogger(), "r" if resumed else "other"):
        pass
    assert points("loss") == [(step, float(step)) for step in range(1, 5)]


@pytest.mark.filterwarnings("ignore")  # warnings of MLflow, which otherwise only the writer imports
def test_a_run_folder_is_found_by_its_mlflow_id(folder: Path) -> None:
    from runner.callbacks._mlflow.store import find_run

    with logging_to(MLflowLogger(), "outputs/r"):
        pass
    mlflow_folder = folder / "outputs" / "r" / "mlflow"
    run_id, uri = read_object(mlflow_folder / "sent.json")["run_id"], MLflowLogger().tracking_uri
    assert (mlflow_folder / "sent.json").stat().st_mode == (mlflow_folder / "spool.jsonl").stat().st_mode
    assert find_run(run_id, uri, None) == folder / "outputs" / "r"
    shutil.rmtree(mlflow_folder)
    mlflow_folder.touch()  # unreadable even for root
    with pytest.raises(ValueError, match="is missing or not readable; .* runner rerun "):
        find_run(run_id, uri, None)
    with pytest.raises(ValueError, match="contain no record"):  # its artifacts were searched
        find_run(run_id, uri, folder)


def test_sent_json_contains_no_password(tmp_path: Path) -> None:
    (tmp_path / "spool.jsonl").write_text("a line\n")
    write_sent(tmp_path, Sent("http://me:secret@host", "abc", 7))
    assert "secret" not in (tmp_path / "sent.json").read_text()
    assert read_sent(tmp_path, "http://me:changed@host").offset == 7
    assert read_sent(tmp_path, "http://me:secret@elsewhere").run_id is None


def test_retrained_batches_appear_twice_if_their_loss_differs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values of an earlier session are kept for retrained batches, until their loss differs."""

    def log_losses(losses: dict[int, float], speed: float) -> None:
        with logging_to(MLflowLogger(), "r") as (state, logger):
            for step, loss in losses.items():
                state.timestamp = Timestamp(batch=step)
                logger.log_metrics({"loss/train/total": loss, "speed": speed})

    log_losses({1: 9.0, 2: 8.0, 3: math.nan, 4: 6.0, 5: 5.0}, speed=1.0)
    log_losses({2: 8.0 + 1e-6, 3: math.nan, 4: 6.0, 5: 5.0, 6: 4.0}, speed=2.0)
    assert not caplog.records
    log_losses({3: math.nan, 4: 7.0, 5: 5.0, 6: 3.0, 7: 2.0}, speed=3.0)
    assert [record.message for record in caplog.records] == [
        "MLflow: batch 4 had a different loss when it was trained before; from that batch on, the run contains the "
        "values of both sessions"
    ]
    log_losses({5: 5.0, 6: 3.0, 7: 2.0, 8: 1.0}, speed=4.0)  # the losses of the last session
    assert len(caplog.records) == 1
    assert points("speed") == [
        *((step, 1.0) for step in (1, 2, 3)),
        *((4, 1.0), (4, 3.0), (5, 1.0), (5, 3.0), (6, 2.0), (6, 3.0), (7, 3.0), (8, 4.0)),
    ]
    losses = [point for point in points("loss/train/total") if point[0] != 3]
    assert losses == [(1, 9), (2, 8), (4, 6), (4, 7), (5, 5), (5, 5), (6, 3), (6, 4), (7, 2), (8, 1)]
    assert query("select value from tags where key = 'runner.departed_at'") == [("4",)]


def test_a_checkpoint_identifies_its_run_if_the_folder_has_lost_its_id(folder: Path) -> None:
    first = MLflowLogger()
    with logging_to(first, "r") as (state, logger):
        log_steps(state, logger, range(1, 6), value=1.0)
        wait_until(lambda: first.run_id is not None)
        saved = first.state_dict()
    shutil.rmtree(Path(state.run_dir) / "mlflow")
    resumed, another = MLflowLogger(), MLflowLogger()
    for destination, name in ((resumed, "r"), (another, "another")):
        with logging_to(destination, name, saved=saved) as (state, logger):
            log_steps(state, logger, range(6, 11), value=2.0)
    assert resumed.run_id == first.run_id != another.run_id
    assert query("select count(*) from runs") == [(2,)]
    assert points("loss", first.run_id) == [(step, 1.0 if step < 6 else 2.0) for step in range(1, 11)]


def test_a_resumed_run_keeps_its_store_unless_another_is_set(tmp_path: Path, monkeypatch: Any):
    from runner.callbacks._mlflow.target import resolve_uri, uri_of_run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store, run = tmp_path / "first.db", tmp_path / "run"
    write_target(run / "mlflow", {"tracking_uri": f"sqlite:///{store}"})
    default = resolve_uri(None)
    assert uri_of_run(default, run) == default  # that store is gone
    store.touch()
    assert uri_of_run(default, run) == f"sqlite:///{store}"
    assert uri_of_run("http://server", run) == "http://server"  # set explicitly
    assert uri_of_run(default, tmp_path / "another") == default
    signed = (run / "mlflow" / "run.json").read_text()
    (run / "mlflow" / "run.json").write_text(signed.replace("first", "fir5t"))  # its signature is invalid now
    (tmp_path / "fir5t.db").touch()
    assert uri_of_run(default, run) == default
    (run / "mlflow" / "run.json").write_text(signed)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///outputs/mlflow.db")
    assert uri_of_run(resolve_uri(None), run) == resolve_uri(None)


@pytest.mark.parametrize("content", ["", '{"spool": "a', "[]"])
def test_a_run_continues_after_its_delivery_files_were_damaged(folder: Path, content: str, caplog: Any) -> None:
    """The spool identifies the run, and the store knows which values it has."""
    first = MLflowLogger()
    with logging_to(first, "r") as (state, logger):
        log_steps(state, logger, range(1, 6))
    for name in ("run.json", "sent.json"):
        (folder / "r" / "mlflow" / name).write_text(content)
    second = MLflowLogger()
    with logging_to(second, "r") as (state, logger):
        log_steps(state, logger, range(6, 11))
    assert points("loss") == [(step, float(step)) for step in range(1, 11)]
    assert second.run_id == first.run_id and query("select count(*) from runs") == [(1,)] and not caplog.records
    assert read_object(folder / "r" / "mlflow" / "sent.json")["ended"] is True


def test_saving_a_checkpoint_syncs_the_spool_to_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination, synced = MLflowLogger(), []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file)))
    with logging_to(destination, "r") as (state, logger):
        log_steps(state, logger, range(1, 6))
        logger.flush()
        spool = (folder / "r" / "mlflow" / "spool.jsonl").stat().st_ino
        assert spool not in synced
        destination.state_dict()  # called by a checkpoint
        assert spool in synced


def test_malformed_entries_are_skipped_and_the_others_are_sent(folder: Path) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 6))
    malformed: list[Any] = [{"m": 5, "s": 1, "t": 1}, {"m": {}, "s": "1", "t": 1}, {"m": {"a": "b"}}, [], 3]
    malformed += [{"status": "http://host", "t": 1}, {"params": 3}, {"tags": []}, {"images": 1}, {"table": {}}]
    malformed += [{"input": 7}, {"artifact": None}]
    with (folder / "r" / "mlflow" / "spool.jsonl").open("a") as spool:
        spool.writelines(json.dumps(entry) + "\n" for entry in malformed)
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(6, 11))
    assert points("loss") == [(step, float(step)) for step in range(1, 11)]
    assert query("select status from runs") == [("FINISHED",)]
