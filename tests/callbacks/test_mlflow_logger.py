"""What MLflow holds is read with sqlite3 from its own database: real stores, real writer processes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from callbacks import InMemoryLogger, MLflowLogger
from callbacks._mlflow_describe import flatten
from callbacks._mlflow_process import shared_writer
from callbacks._mlflow_spool import Spool, read_entries, read_json, write_json
from callbacks._mlflow_target import ui_command
from runner import ClassificationModel, Logger, State, Time, Timestamp, Trainer
from runner.precision import Precision

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its schema, whose making takes seconds: each test has a copy."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    make = f"from mlflow import MlflowClient; MlflowClient('sqlite:///{path}').get_experiment_by_name('x')"
    subprocess.run([sys.executable, "-c", make], check=True, capture_output=True, timeout=60)
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an empty default store in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    shutil.copy(empty_store, tmp_path / "outputs" / "mlflow.db")
    return tmp_path


def query(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Rows of the default store."""
    with contextlib.closing(sqlite3.connect("outputs/mlflow.db", timeout=30)) as connection:
        return connection.execute(sql, values).fetchall()


def points(key: str, run_id: str | None = None) -> list[tuple[int, float]]:
    """All points of a metric as (step, value), doubles included."""
    rows = query("select step, value, is_nan from metrics where key = ? and run_uuid like ?", key, run_id or "%")
    return sorted((step, math.nan if is_nan else value) for step, value, is_nan in rows)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def make_state(run_dir: str | Path, **fields: Any) -> State:
    model = ClassificationModel(nn.Linear(2, 2), num_classes=2)
    return State(
        unwrapped_model=model,
        model=model,
        device=torch.device("cpu"),
        precision=Precision("fp32"),
        seed=0,
        rank_zero_seed=0,
        run_name="a run",
        run_dir=Path(run_dir),
        max_duration=Time(1, "ep"),  # type: ignore[arg-type]
        **fields,
    )


@contextlib.contextmanager
def logging_to(
    destination: MLflowLogger, run_dir: str | Path, saved: dict[str, Any] | None = None, **fields: Any
) -> Iterator[tuple[State, Logger]]:
    """A run of a destination, from INIT to its end, with the error that left the block; `saved` is of a checkpoint."""
    state = make_state(run_dir, **fields)
    logger = Logger(state, [destination], interval=0.02)
    destination.init(state, logger)
    if saved is not None:
        destination.load_state_dict(saved)
    try:
        yield state, logger
    except BaseException as error:
        state.error = error
        raise
    finally:
        logger.flush()
        destination.close(state, logger)
        logger.close()


def log_steps(state: State, logger: Logger, steps: range, value: float = 0.0) -> None:
    for step in steps:
        state.timestamp = Timestamp(batch=step)
        logger.log_metrics({"loss": value or float(step)})


class Failing(ClassificationModel):
    def loss(self, outputs: Any, batch: Any) -> Any:
        raise ValueError("a loss that fails")


def make_trainer(model: type[ClassificationModel], *loggers: Any, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, 2, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(12)]
    return Trainer(
        model=model(nn.Linear(2, 2), num_classes=2),
        train_dataloader=samples,
        eval_dataloader=samples[:2],
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_duration="2ep",
        loggers=loggers,
        device="cpu",
        **arguments,
    )


def test_a_run_is_in_mlflow_as_it_was(folder: Path) -> None:
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
    assert {key for (key,) in query("select distinct key from metrics where key not like 'system/%'")} == {*memory.data}
    for key in memory.data:
        steps, values = memory.get_timeseries(key)
        assert points(key) == sorted(zip(steps, values, strict=True)), key
    params = dict(query("select key, value from params"))
    assert params == {"optimizer.lr": "0.1", "data._target_": "data.Toy", "data.size": "12", "extra.depth": "3"}
    tags = dict(query("select key, value from tags"))
    assert {"team": "vision", "torch": version("torch"), "mlflow.source.type": "LOCAL"}.items() <= tags.items()
    assert tags["command"].split()[0].startswith("python") and "mlflow.source.git.commit" not in tags
    inputs = query(
        "select d.name, t.value, d.dataset_profile from datasets d join inputs i on i.source_id = d.dataset_uuid "
        "join input_tags t on t.input_uuid = i.input_uuid where i.destination_id = ? order by t.value desc",
        run_id,
    )
    assert inputs == [("Toy", "train", '{"num_batches": 12}'), ("Toy", "eval", '{"num_batches": 2}')]
    artifacts = folder / "outputs" / "mlartifacts" / run_id / "artifacts"
    assert (artifacts / "texts" / "notes.txt").read_text() == "some notes"
    table = json.loads((artifacts / "tables" / "worst_ cases.json").read_text())
    assert table == {"columns": ["target", "score"], "data": [[7, "nan"], [9, 0.5]]}
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "tables/worst_ cases.json", "type": "table"}]
    stems = {path.name.split("+timestamp")[0] for path in (artifacts / "images").glob("*.png")}
    assert stems == {"Images~Train~00+step+24", "Images~Train~01+step+24", "Images~Eval+step+24"}
    assert not list((folder / "outputs" / "toy" / "mlflow" / "images").iterdir())
    assert not list((folder / "outputs" / ".mlflow_unsent").iterdir())


def test_a_failure_is_failed_with_its_trace(folder: Path) -> None:
    mlflow = MLflowLogger()
    with pytest.raises(ValueError, match="a loss that fails"):
        make_trainer(Failing, mlflow, run_dir="outputs/failing").fit()
    assert query("select status from runs") == [("FAILED",)]
    trace = folder / "outputs" / "mlartifacts" / str(mlflow.run_id) / "artifacts" / "error.txt"
    assert "ValueError: a loss that fails" in trace.read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_an_interrupted_run_is_killed(folder: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
        raise error
    # Who interrupts does not wait for long; the writer goes on for some seconds.
    wait_until(lambda: query("select status from runs") == [("KILLED",)])


def test_a_run_that_is_refused_before_it_begins_leaves_nothing(folder: Path) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
    rows, files = query("select run_uuid, status, end_time from runs"), sorted(Path("r").rglob("*"))
    for run_dir in ("r", "new"):
        with pytest.raises(ValueError, match="refused"), logging_to(MLflowLogger(), run_dir, config={"lr": 1}):
            raise ValueError("refused")
    shared_writer().finish(shared_writer().deliver(Path("r")))  # has it take up whatever there might be
    assert (query("select run_uuid, status, end_time from runs"), sorted(Path("r").rglob("*"))) == (rows, files)
    assert not Path("new").exists()


def test_one_writer_serves_runs_one_after_another(folder: Path) -> None:
    pids = set()
    for index in range(3):
        with logging_to(MLflowLogger(experiment_name="sweep"), f"outputs/{index}") as (state, logger):
            log_steps(state, logger, range(1, 4), value=index + 1.0)
        pids.add(shared_writer().pid)
    assert len(pids) == 1
    assert query("select distinct status from runs") == [("FINISHED",)]
    assert sorted(points("loss")) == [(step, value) for step in (1, 2, 3) for value in (1.0, 2.0, 3.0)]


def test_what_exceeds_the_limits_of_mlflow_arrives_cut_to_fit(folder: Path) -> None:
    odd = {"loss (train)%": 1.0, "/a//b/../c": 2.0, "k" * 300: 3.0, "k" * 301: 4.0, "größe:µ": 5.0}
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
    largest = sys.float_info.max  # how SQL stores keep an infinity
    assert metrics == {
        "loss _train__": (7, 1.0, 0),
        "a/b/__/c": (7, 2.0, 0),
        "größe:µ": (7, 5.0, 0),
        "nan": (7, 0.0, 1),
        "inf": (7, largest, 0),
        "minus": (7, -largest, 0),
    }
    params = dict(query("select key, value from params"))
    assert len(params) == 154 and len(params["long"]) == 6000 and params["p149"] == "149" and params["p_"] == "1"
    assert [len(value) for key, value in query("select key, value from tags") if key.startswith("ttt")] == [8000]


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(folder: Path) -> None:
    first = MLflowLogger()
    with logging_to(first, "r", config={"lr": 0.1, "kept": 1}) as (state, logger):
        log_steps(state, logger, range(1, 11), value=1.0)
    second = MLflowLogger()
    with logging_to(second, "r", config={"lr": 0.2, "kept": 1}) as (state, logger):
        log_steps(state, logger, range(6, 16), value=2.0)
        wait_until(lambda: query("select status from runs") == [("RUNNING",)])
        assert second.run_id == first.run_id
        logger.log_metrics({"other": 3.0}, step=8)  # new at a step that is known
    assert points("loss") == [(step, 1.0) for step in range(1, 11)] + [(step, 2.0) for step in range(11, 16)]
    assert points("other") == [(8, 3.0)]
    assert query("select status from runs") == [("FINISHED",)]
    assert dict(query("select key, value from params")) == {"lr": "0.1", "kept": "1"}
    assert query("select key, value from tags where key like 'param_%'") == [("param_changed.lr", "0.2")]


def test_batches_that_come_out_otherwise_are_there_twice(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What an earlier session logged is the truth of batches that are trained again, until their loss is another."""

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
        "MLflow: batch 4 was trained before with another loss; from it on the run holds the values of both"
    ]
    log_losses({5: 5.0, 6: 3.0, 7: 2.0, 8: 1.0}, speed=4.0)  # of the newer future, not of the older
    assert len(caplog.records) == 1
    assert points("speed") == [
        *((step, 1.0) for step in (1, 2, 3)),
        *((4, 1.0), (4, 3.0), (5, 1.0), (5, 3.0), (6, 2.0), (6, 3.0), (7, 3.0), (8, 4.0)),
    ]
    found = [point for point in points("loss/train/total") if point[0] != 3]
    assert found == [(1, 9), (2, 8), (4, 6), (4, 7), (5, 5), (5, 5), (6, 3), (6, 4), (7, 2), (8, 1)]
    assert query("select value from tags where key = 'runner.departed_at'") == [("4",)]


def test_a_writer_that_was_killed_is_followed_by_another_and_nothing_is_doubled(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 200))
        wait_until(lambda: len(points("loss")) == 199)
        os.kill(shared_writer().pid, signal.SIGKILL)
        # As if it had been killed after MLflow had taken the points and before it had noted this.
        wait_until(lambda: any("ended unexpectedly" in record.message for record in caplog.records))
        sent = read_json(folder / "r" / "mlflow" / "sent.json")
        write_json(folder / "r" / "mlflow" / "sent.json", sent | {"offset": 0, "lines": 0})
        log_steps(state, logger, range(200, 251))
    assert points("loss") == [(step, float(step)) for step in range(1, 251)]
    assert query("select status from runs") == [("FINISHED",)]
    assert len(caplog.records) == 1


CHILD = """
import os, signal, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
from callbacks import MLflowLogger
MLflowLogger.warm_up()
from test_mlflow_logger import *
destination = MLflowLogger()
state = make_state(sys.argv[1])
logger = Logger(state, [destination])
destination.init(state, logger)
log_steps(state, logger, range(1, 26))
if "kill" in sys.argv and "kill-writer" not in sys.argv:  # the writer has some seconds, without those that it starts in
    logger.flush()
    wait_until(lambda: destination.run_id)
log_steps(state, logger, range(26, 51))
logger.flush()
if "kill-writer" in sys.argv:
    os.kill(shared_writer().pid, signal.SIGKILL)
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
destination.close(state, logger)
logger.close()
"""


def start_child(*arguments: str) -> subprocess.Popen[bytes]:
    program = CHILD.format(root=str(ROOT), tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE)


def finish_child(child: subprocess.Popen[bytes], code: int) -> None:
    _, errors = child.communicate(timeout=60)
    assert child.returncode == code, errors.decode()


def test_a_killed_trainer_leaves_a_failed_run_with_all_its_points(folder: Path) -> None:
    finish_child(start_child("r", "kill"), -signal.SIGKILL)
    wait_until(lambda: query("select status from runs") == [("FAILED",)])
    assert points("loss") == [(step, float(step)) for step in range(1, 51)]


def test_what_is_left_is_sent_by_the_next_run_or_by_hand(folder: Path, run_app: Any) -> None:
    for child in [start_child("outputs/a", "kill", "kill-writer"), start_child("outputs/b", "kill", "kill-writer")]:
        finish_child(child, -signal.SIGKILL)
    assert len(list((folder / "outputs" / ".mlflow_unsent").iterdir())) == 2
    done = run_app("mode=sync", "resume=outputs/a")
    assert "outputs/a: MLflow has all of it\n" in done.stdout
    assert query("select status from runs") == [("FAILED",)]
    with logging_to(MLflowLogger(), "outputs/c"):
        pass
    wait_until(lambda: not list((folder / "outputs" / ".mlflow_unsent").iterdir()))
    assert sorted(query("select status from runs")) == [("FAILED",), ("FAILED",), ("FINISHED",)]
    assert points("loss") == sorted((step, float(step)) for step in [*range(1, 51)] * 2)


def test_four_processes_make_one_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for child in [start_child(f"outputs/{name}") for name in "abcd"]:
        finish_child(child, 0)
    assert query("select status from runs") == [("FINISHED",)] * 4
    assert query("select count(*) from experiments where name = 'runner'") == [(1,)]
    assert points("loss") == sorted((step, float(step)) for step in [*range(1, 51)] * 4)


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("nowhere://x", "nowhere"),
        ("http://127.0.0.1:{port}", "cannot be reached (Connection refused)"),
        ("sqlite:///file/mlflow.db", "file"),
    ],
)
def test_training_goes_on_without_mlflow(
    uri: str,
    reason: str,
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("where a folder is wanted")
    started = time.monotonic()
    with logging_to(MLflowLogger(uri.format(port=free_port)), "r") as (state, logger):
        log_steps(state, logger, range(1, 11))
    assert time.monotonic() - started < 20
    [record] = caplog.records
    assert (record.name, record.levelno) == ("runner", logging.WARNING)
    assert reason in record.message and f"mode=sync resume={tmp_path / 'r'}" in record.message
    assert sum("m" in (entry or {}) for entry, _ in read_entries(Path("r/mlflow/spool.jsonl"))) == 10


def test_the_wait_at_the_end_is_bounded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        destination = MLflowLogger(f"http://127.0.0.1:{deaf.getsockname()[1]}", close_timeout=1.5)
        with logging_to(destination, "r"):
            started = time.monotonic()
        assert 1.4 < time.monotonic() - started < 5
    assert capsys.readouterr().err == "sending to MLflow: 0 of 4 lines\n"
    [record] = caplog.records
    assert "0 of 4 lines were sent" in record.message
    os.kill(shared_writer().pid, signal.SIGKILL)  # it would wait for the server, beside the tests that follow


def test_a_folder_that_cannot_be_written_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "r").write_text("no folder")
    with logging_to(MLflowLogger(), "r") as (state, logger):
        log_steps(state, logger, range(1, 3))
        logger.log_table(["a"], [[1]], "t")
    assert [record.message.partition(",")[0] for record in caplog.records] == ["MLflow: this run is not recorded"]


def test_an_idle_writer_leaves_no_trace(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from callbacks import MLflowLogger; MLflowLogger.warm_up();"
        "from callbacks._mlflow_process import shared_writer; print(shared_writer().pid);"
        "print(*{'torch', 'mlflow'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    pid, imported = done.stdout.splitlines()
    assert (done.returncode, done.stderr, imported) == (0, "", "")
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert not list(tmp_path.iterdir())


def test_a_callbacks_folder_of_the_user_is_not_the_writers(folder: Path) -> None:
    (folder / "callbacks").mkdir()
    (folder / "callbacks" / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    finish_child(start_child("r"), 0)
    assert query("select status from runs") == [("FINISHED",)]


def test_a_spool_survives_a_full_disk_and_a_torn_line(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"tags": {}})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limit[1]))
    try:
        with pytest.raises(OSError, match="could be written"):
            spool.append({"tags": {"a long key": "a long value"}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    spool.append({"tags": {"after": 1}})
    lines = spool.lines
    spool.close()
    entries = [entry for entry, _ in read_entries(spool.path)]
    assert entries == [{"tags": {}}, None, {"tags": {"after": 1}}]
    assert lines == len(entries)
    with spool.path.open("a") as file:
        file.write('{"tags": {"cut')
    again = Spool(tmp_path)
    again.append({"tags": {"resumed": 1}})
    again.close()
    assert [entry for entry, _ in read_entries(again.path)][3:] == [None, {"tags": {"resumed": 1}}]


def test_the_address_comes_from_the_argument_then_the_environment_then_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = MLflowLogger()
    assert default.tracking_uri == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert default.experiment_name == "runner"
    assert default.ui_command == "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    assert (MLflowLogger().tracking_uri, MLflowLogger().experiment_name) == (
        "http://tracking:5000",
        "from the environment",
    )
    given = MLflowLogger("sqlite:////elsewhere/a b.db", "given")
    assert (given.tracking_uri, given.experiment_name) == ("sqlite:////elsewhere/a b.db", "given")
    assert given.ui_command == "mlflow ui --backend-store-uri 'sqlite:////elsewhere/a b.db'"


def test_the_ui_command_shows_the_run_and_no_password() -> None:
    assert ui_command("http://host:5000/", "3", "abc") == "http://host:5000/#/experiments/3/runs/abc"
    assert "secret" not in ui_command("postgresql://user:secret@host/db", None, None)


def test_parameters_are_flat_and_spelled_as_on_the_command_line() -> None:
    nested = {"a": {"b": [1, 2], "c": {}}, "d": None, "e": True, "f": [{"g": "text"}, 2], 3: 1e-4}
    expected = {"a.b": "[1, 2]", "a.c": "{}", "d": "null", "e": "true", "f.0.g": "text", "f.1": "2", "3": "0.0001"}
    assert flatten(nested) == expected


@pytest.mark.parametrize(("name", "value"), [("close_timeout", -1), ("system_metrics_interval", 0)])
def test_wrong_arguments_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        MLflowLogger(**{name: value})  # type: ignore[arg-type]


def test_a_checkpoint_knows_the_run_where_its_folder_does_not(folder: Path) -> None:
    first = MLflowLogger()
    with logging_to(first, "r") as (state, logger):
        log_steps(state, logger, range(1, 6), value=1.0)
        wait_until(lambda: first.run_id is not None)
        saved = first.state_dict()
    shutil.rmtree(Path(state.run_dir) / "mlflow")
    resumed, another = MLflowLogger(), MLflowLogger()
    for one, name in ((resumed, "r"), (another, "another")):
        with logging_to(one, name, saved=saved) as (state, logger):
            log_steps(state, logger, range(6, 11), value=2.0)
    assert resumed.run_id == first.run_id != another.run_id
    assert query("select count(*) from runs") == [(2,)]
    assert points("loss", first.run_id) == [(step, 1.0 if step < 6 else 2.0) for step in range(1, 11)]


def test_a_resumed_run_stays_in_its_store_wherever_the_command_is_given(tmp_path: Path, monkeypatch: Any):
    from callbacks._mlflow_target import resolve_uri, uri_of_run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store, run = tmp_path / "first.db", tmp_path / "run"
    (run / "mlflow").mkdir(parents=True)
    (run / "mlflow" / "run.json").write_text(json.dumps({"tracking_uri": f"sqlite:///{store}"}))
    default = resolve_uri(None)
    assert uri_of_run(default, run) == default  # that store is gone
    store.touch()
    assert uri_of_run(default, run) == f"sqlite:///{store}"
    assert uri_of_run("http://server", run) == "http://server"  # which was asked for
    assert uri_of_run(default, tmp_path / "another") == default
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///outputs/mlflow.db")
    assert uri_of_run(resolve_uri(None), run) == resolve_uri(None)
