"""The MLflow logger with real stores and writer processes; MLflow's database is read with sqlite3."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
import signal
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import main_runs
import numpy as np
import pytest
import torch
from mlflow_runs import log_steps, logging_to, points, query
from python_process import wait_until
from tiny_runs import tiny_trainer
from torch import nn

from runner import ClassificationModel, Trainer
from runner.callbacks import InMemoryLogger, MLflowLogger
from runner.callbacks._mlflow.description import flatten
from runner.callbacks._mlflow.target import read_target, ui_command
from runner.callbacks._mlflow.writer_process import shared_writer
from runner.distributed.session import end
from runner.terminal import commands
from runner.terminal.commands import typed_command

HASH = "_[0-9a-f]{8}"  # appended to names that MLflow does not allow


class Failing(ClassificationModel):
    """Fails in the second batch; after a failure in the first, MLflow would have no run."""

    losses = 0

    def loss(self, outputs: Any, batch: Any) -> Any:
        self.losses += 1
        if self.losses > 1:
            raise ValueError("a loss that fails")
        return super().loss(outputs, batch)


class FailingAtOnce(ClassificationModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        raise ValueError("a loss that fails")


def make_trainer(model: type[ClassificationModel], *loggers: Any, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, 2, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(12)]
    data = {"train_dataloader": samples, "eval_dataloader": samples[:2], "max_duration": "2ep"}
    return tiny_trainer(model=model(nn.Linear(2, 2), num_classes=2), loggers=loggers, **data, **arguments)


def test_mlflow_has_the_data_and_artifacts_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)  # another test may have imported it
    memory = InMemoryLogger()
    mlflow = MLflowLogger(tags={"team": "vision"}, system_metrics_interval=0.1)
    config = {"optimizer": {"lr": 0.1}, "data": {"_target_": "data.Toy", "size": 12}}
    with make_trainer(
        ClassificationModel, mlflow, memory, run_name="toy", run_dir="outputs/toy", config=config
    ) as trainer:
        trainer.fit()
        trainer.logger.log_hyperparameters({"extra": {"depth": 3}})
        trainer.logger.log_table(["target", "score"], [[7, math.nan], [9, 0.5]], "worst: cases")
        trainer.logger.log_images(np.zeros((2, 8, 8, 1), np.uint8), "Images/Train", captions=["7 -> 1", "long " * 20])
        trainer.logger.log_images(np.zeros((1, 8, 8, 3), np.uint8), "Images/Eval")
        (folder / "notes.txt").write_text("some notes")
        trainer.logger.log_artifact("notes.txt", "texts")
        wait_until(lambda: query("select 1 from metrics where key = 'system/cpu_utilization_percentage'"))
    assert "mlflow" not in sys.modules
    [(run_id, name, status, start, end)] = query("select run_uuid, name, status, start_time, end_time from runs")
    assert (run_id, name, status) == (mlflow.run_id, "toy", "FINISHED")
    assert start <= end <= time.time() * 1000
    assert query("select name from experiments where experiment_id = 1") == [("runner",)]
    logged = {key for (key,) in query("select distinct key from metrics where key not like 'system/%'")}
    assert logged == {*memory.data, "best/eval/loss", "best/eval/MulticlassAccuracy"}
    for key in memory.data:
        steps, values = memory.get_timeseries(key)
        assert points(key) == sorted(zip(steps, values, strict=True)), key
    params = dict(query("select key, value from params"))
    described = {"optimizer.lr": "0.1", "data._target_": "data.Toy", "data.size": "12", "model.num_parameters": "6"}
    assert params == described | {"extra.depth": "3"}
    tags = dict(query("select key, value from tags"))
    assert {"team": "vision", "torch": version("torch"), "mlflow.source.type": "JOB"}.items() <= tags.items()
    assert tags["mlflow.source.name"].startswith("python") and "mlflow.source.git.commit" not in tags
    assert tags["mlflow.note.content"].startswith("`` python") and "6 parameters" in tags["mlflow.note.content"]
    inputs = query(
        "select d.name, t.value, d.dataset_profile from datasets d join inputs i on i.source_id = d.dataset_uuid "
        "join input_tags t on t.input_uuid = i.input_uuid where i.destination_id = ? order by t.value desc",
        run_id,
    )
    assert inputs == [("Toy", "train", "{}"), ("Toy", "eval", "{}")]
    artifacts = folder / "outputs" / "mlartifacts" / run_id / "artifacts"
    assert (artifacts / "texts" / "notes.txt").read_text() == "some notes"
    (path,) = (artifacts / "tables").glob("worst_ cases_*.json")
    table = json.loads(path.read_text())
    assert table == {"columns": ["target", "score"], "data": [[7, "nan"], [9, 0.5]]}
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": f"tables/{path.name}", "type": "table"}]
    stems = {path.name.split("+timestamp")[0] for path in (artifacts / "images").glob("*.png")}
    assert stems == {"Images~Train~00+step+24", "Images~Train~01+step+24", "Images~Eval+step+24"}
    assert not list((folder / "outputs" / "toy" / "mlflow" / "images").iterdir())
    assert not list((folder / "outputs" / ".mlflow_unsent").iterdir())


def test_a_failed_run_has_its_status_and_traceback_in_mlflow(folder: Path) -> None:
    mlflow = MLflowLogger()
    with pytest.raises(ValueError, match="a loss that fails"):
        make_trainer(Failing, mlflow, run_dir="outputs/failing").fit()
    assert query("select status from runs") == [("FAILED",)]
    trace = folder / "outputs" / "mlartifacts" / str(mlflow.run_id) / "artifacts" / "error.txt"
    assert "ValueError: a loss that fails" in trace.read_text()


def test_a_failure_in_the_first_batch_leaves_no_run(folder: Path) -> None:
    with pytest.raises(ValueError, match="a loss that fails"):
        make_trainer(FailingAtOnce, MLflowLogger(), run_dir="outputs/failing").fit()
    assert query("select count(*) from runs") == [(0,)]
    assert not (folder / "outputs" / "failing").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_has_the_status_killed(folder: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises((KeyboardInterrupt, SystemExit)), logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
        end(number, None)
    signal.signal(number, before)
    # An interrupted command does not wait for long; the writer continues for some seconds.
    wait_until(lambda: query("select status from runs") == [("KILLED",)])


@pytest.mark.slow
def test_an_error_before_the_first_batch_adds_no_run_and_changes_none(folder: Path) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
    rows, files = query("select run_uuid, status, end_time from runs"), sorted(Path("r").rglob("*"))
    for name in ("r", "new"):
        with pytest.raises(ValueError, match="refused"), logging_to(MLflowLogger(), name, config={"lr": 1}):
            raise ValueError("refused")
    target = read_target(Path("r/mlflow"))
    assert target is not None
    stopped = threading.Event()
    run_dir = folder / "r"  # the writer may have another working directory
    number = shared_writer().deliver(run_dir, target, lambda report: stopped.set() if "stopped" in report else None)
    shared_writer().finish(number)  # makes it send all that is left
    assert stopped.wait(60)
    assert (query("select run_uuid, status, end_time from runs"), sorted(Path("r").rglob("*"))) == (rows, files)
    assert not Path("new").exists()


def test_one_writer_serves_consecutive_runs(folder: Path) -> None:
    pids = set()
    for index in range(3):
        with logging_to(MLflowLogger(experiment_name="sweep"), f"outputs/{index}") as (state, logger):
            log_steps(state, logger, range(1, 4), value=index + 1.0)
        pids.add(shared_writer().pid)
    assert len(pids) == 1
    assert query("select distinct status from runs") == [("FINISHED",)]
    assert sorted(points("loss")) == [(step, value) for step in (1, 2, 3) for value in (1.0, 2.0, 3.0)]


def test_names_and_values_beyond_the_limits_of_mlflow_are_shortened(folder: Path) -> None:
    odd = {"/a//b/../c": 2.0, "k" * 300: 3.0, "k" * 301: 4.0, "größe:µ": 5.0}
    special = {"nan": math.nan, "inf": math.inf, "minus": -math.inf}
    parameters = {f"p{index}": index for index in range(150)} | {"long": "x" * 9000, "p*": 1, "empty": "", "none": None}
    with logging_to(MLflowLogger(tags={"t" * 300: "v" * 9000}), "r", config=parameters) as (_, logger):
        logger.log_metrics({f"many/{index}": index for index in range(1500)} | odd | special, step=7)
    metrics = {
        key: (step, value, is_nan) for key, step, value, is_nan in query("select key, step, value, is_nan from metrics")
    }
    assert all(metrics.pop(f"many/{index}") == (7, index, 0) for index in range(1500))
    long = [metrics.pop(key)[1] for key in [*metrics] if key.startswith("kkk") and len(key) == 250]
    assert sorted(long) == [3.0, 4.0]
    largest = sys.float_info.max  # MLflow's SQL stores save it instead of infinity
    assert {re.sub(HASH, "#", key): value for key, value in metrics.items()} == {
        "a/b/__/c#": (7, 2.0, 0),
        "größe:µ": (7, 5.0, 0),
        "nan": (7, 0.0, 1),
        "inf": (7, largest, 0),
        "minus": (7, -largest, 0),
    }
    params = {re.sub(HASH, "#", key): value for key, value in query("select key, value from params")}
    assert len(params) == 152 and len(params["long"]) == 6000 and params["p149"] == "149" and params["p_#"] == "1"
    assert [len(value) for key, value in query("select key, value from tags") if key.startswith("ttt")] == [8000]


def test_invalid_names_get_unique_replacements_and_one_warning_per_session(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a+b", "a_b", "a@b", "a//b", "a/b", "/a/b", "a/b/", "a/./b", "a:b"]
    for steps in (range(1, 3), range(3, 5)):
        with caplog.at_level(logging.WARNING, "runner"), logging_to(MLflowLogger(), "r") as (_, logger):
            for step in steps:
                logger.log_metrics({name: float(index) for index, name in enumerate(names)}, step=step)
            logger.log_table(["x"], [[1]], "a:b")
            logger.log_table(["x"], [[2]], "a_b")
    rows = query("select key, group_concat(distinct value), count(*) from metrics group by key")
    assert len(rows) == len(names) and {count for _, _, count in rows} == {4}
    assert sorted(value for _, value, _ in rows) == [str(float(index)) for index in range(len(names))]
    unchanged = {"a_b", "a/b", "a:b"}
    assert unchanged <= {key for key, _, _ in rows}
    assert all(re.fullmatch(f"a[_/]b{HASH}", key) for key, _, _ in rows if key not in unchanged)
    ((tables,),) = query("select value from tags where key = 'mlflow.loggedArtifacts'")
    paths = sorted(re.sub(HASH, "#", table["path"]) for table in json.loads(tables))
    assert paths == ["tables/a_b#.json", "tables/a_b.json"]
    warning, _ = (text for record in caplog.records if "is not a valid name" in (text := record.getMessage()))
    assert re.fullmatch(rf"MLflow: '\S+' is not a valid name there: it is logged as 'a[_/]b{HASH}' \(any .*", warning)


def test_the_tracking_uri_comes_from_the_argument_the_environment_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = MLflowLogger()
    assert default.tracking_uri == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert default.experiment_name == "runner"
    assert default.ui_command == "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    logger = MLflowLogger()
    assert (logger.tracking_uri, logger.experiment_name) == ("http://tracking:5000", "from the environment")
    logger = MLflowLogger("sqlite:////elsewhere/a b.db", "argument")
    assert (logger.tracking_uri, logger.experiment_name) == ("sqlite:////elsewhere/a b.db", "argument")
    assert logger.ui_command == "mlflow ui --backend-store-uri 'sqlite:////elsewhere/a b.db'"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ftp://x", "MLflow does not know this scheme; give an address that begins with sqlite, postgresql"),
        ("localhost:5000", "MLflow does not know this scheme"),
        ("http://", "names no server"),
        ("http://host:port/", "Port could not be cast"),
        ("https://[::1", "Invalid IPv6 URL"),
        ("sqlite://outputs/mlflow.db", "must begin with three slashes"),
    ],
)
def test_an_invalid_tracking_uri_is_rejected(address: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=re.escape(f"tracking_uri={address!r}: ") + why):
        MLflowLogger(address)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    with pytest.raises(ValueError, match=why):
        MLflowLogger()


@pytest.mark.parametrize(
    "address",
    ["mlruns", "./a:b", "file:///a/b", "databricks", "databricks://profile", "postgresql+psycopg2://me:pw@host/db"],
)
def test_each_kind_of_tracking_uri_is_accepted(address: str) -> None:
    assert MLflowLogger(address).tracking_uri == address


def test_the_command_of_a_job_is_that_of_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["/usr/bin/python", "-m", "runner", "-m", "seed=0,1"]
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert typed_command() == typed
    worker = [typed[0], "-m", "joblib.externals.loky.backend.popen_loky_posix", "--process-name", "LokyProcess-1"]
    monkeypatch.setattr(sys, "orig_argv", worker)
    monkeypatch.setattr(commands, "sweep_arguments", ["train", "seed=0,1", "-m"])
    assert typed_command() == [*typed[:3], "train", "seed=0,1", "-m"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [("joblib", "hydra.launcher.n_jobs=2"), ("submitit_local",)], ids=" ".join)
def test_jobs_have_the_command_of_the_sweep_in_mlflow(launcher: tuple[str, ...], folder: Path, run_app: Any) -> None:
    sweep = ("seed=0,1", *main_runs.SHORT, "callbacks=mlflow_logger", f"hydra/launcher={launcher[0]}", *launcher[1:])
    run_app("-m", *sweep)
    commands = main_runs.query(folder, "select value from tags where key = 'mlflow.source.name'")
    expected = [("-m", *sweep), *[("train", *sweep, "-m")] * 2]  # the first is the sweep's own run
    assert sorted(commands) == [(shlex.join(("python", "-m", "runner", *command)),) for command in expected]


def test_the_ui_command_links_to_the_run_without_a_password() -> None:
    assert ui_command("http://host:5000/", "3", "abc") == "http://host:5000/#/experiments/3/runs/abc"
    assert ui_command("https://me:secret@host", "3", "abc") == "https://host/#/experiments/3/runs/abc"
    assert ui_command("https://me:secret@host", None, None) == "https://host"
    assert "secret" not in ui_command("postgresql://user:secret@host/db", None, None)


def test_parameters_are_flat_and_written_as_on_the_command_line() -> None:
    nested = {"a": {"b": [1, 2], "c": {}}, "d": None, "e": True, "f": [{"g": "text"}, 2], 3: 1e-4}
    expected = {"a.b": "[1, 2]", "a.c": "{}", "d": "null", "e": "true", "f.0.g": "text", "f.1": "2", "3": "0.0001"}
    assert flatten(nested) == expected


@pytest.mark.parametrize(("name", "value"), [("close_timeout", -1), ("system_metrics_interval", 0)])
def test_wrong_arguments_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        MLflowLogger(**{name: value})  # type: ignore[arg-type]


def test_the_folder_of_an_artifact_may_be_any_relative_path(folder: Path) -> None:
    with logging_to(MLflowLogger(), "r") as (_, logger):
        (folder / "r").mkdir(exist_ok=True)
        (folder / "r" / "a.txt").write_text("a")
        for path in ("plots/", "./x//y", "."):
            logger.log_artifact(folder / "r" / "a.txt", path)
    [(uri,)] = query("select artifact_uri from runs")
    stored = Path(uri.removeprefix("file://"))
    assert {str(file.relative_to(stored)) for file in stored.rglob("a.txt")} == {"plots/a.txt", "x/y/a.txt", "a.txt"}
    assert query("select status from runs") == [("FINISHED",)]
