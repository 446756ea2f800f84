"""Slow, temporarily unreachable and missing servers: a real `mlflow server` behind a proxy."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import stores
import torch
from made_once import MAKE_STORES
from python_process import PATIENCE, processes_in, run_python, start_python, wait_until
from tiny_runs import tiny_trainer

from runner import Callback, Logger, State, Trainer
from runner.callbacks import InMemoryLogger, MLflowLogger
from runner.callbacks._mlflow.spool import read_entries
from runner.callbacks._mlflow.writer_process import shared_writer
from runner.files.lock import lock_file

TINY = ["model=mlp", "data.batch_size=400", "data.eval_batch_size=300", "callbacks.mlflow_logger.close_timeout=30"]


class Proxy(ThreadingHTTPServer):
    """Forwards calls to a server, depending on its mode.

    'up': at once; 'slow': after half a second; 'cut': the server handles each call, but the first answer for each path
    is lost; 'failing': each answer has status 500; 'down': connections are closed; 'silent': connections are accepted,
    but never answered; 'no files': answers for artifacts have status 500.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, server: Any, mode: str = "up", port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Forwarding)
        self.server = server
        self.mode = mode
        self.calls: Counter[str] = Counter()  # by mode
        self.cut: set[str] = set()  # paths whose first answer was lost
        self.released = threading.Event()
        self.uri = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _Forwarding(BaseHTTPRequestHandler):
    server: Proxy  # type: ignore[assignment]

    def _forward(self) -> None:
        proxy, mode = self.server, self.server.mode
        proxy.calls[mode] += 1
        if mode == "silent":
            proxy.released.wait()
        if mode == "slow":
            proxy.released.wait(0.5)
        if mode in ("silent", "down"):
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if mode == "failing" or (mode == "no files" and "mlflow-artifacts" in self.path):
            self.send_error(500)
            return
        connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        path = self.path.partition("/artifacts/")[0]
        if mode == "cut" and self.command != "GET" and path not in proxy.cut:
            proxy.cut.add(path)
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", answer.getheader("Content-Type", ""))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Store:
    """What the server has stored of an experiment, including duplicates."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.experiment = uuid.uuid4().hex

    def query(self, what: str, table: str, where: str = "1") -> list[tuple[Any, ...]]:
        sql = f"select {what} from {table} where {where} and run_uuid in (select run_uuid from runs join experiments"
        return self.server.query(f"{sql} using (experiment_id) where experiments.name = ?)", self.experiment)

    def statuses(self) -> list[str]:
        return sorted(status for (status,) in self.query("status", "runs"))

    def points(self, where: str = "key not like 'system/%'") -> Counter[tuple[str, int]]:
        return Counter((key, step) for key, step in self.query("key, step", "metrics", where))

    def artifacts(self) -> list[str]:
        [(uri,)] = self.query("artifact_uri", "runs")
        assert uri.startswith("mlflow-artifacts:/")
        folder = self.server.folder / "artifacts" / uri.removeprefix("mlflow-artifacts:/")
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def store(mlflow_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The server's store; runs of this process list unsent data in `tmp_path`, not in the repository."""
    monkeypatch.chdir(tmp_path)
    return Store(mlflow_server)


def logged(run_dir: Path) -> Counter[tuple[str, int]]:
    """Return the keys and steps of the values in a run's spool."""
    entries = [entry for entry, _ in read_entries(run_dir / "mlflow" / "spool.jsonl", limit=None) if entry]
    return Counter((key, entry["s"]) for entry in entries if "m" in entry for key in entry["m"])


def start_app(folder: Path, *arguments: str, env: Mapping[str, str] = {}) -> Any:
    command = ["-m", "runner", *TINY, *arguments]
    silent = subprocess.DEVNULL
    return start_python(command, cwd=folder, env=os.environ | env, stdout=silent, stderr=silent)


def run_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("outputs/*/*/mlflow"))


class Script(Callback):
    """Runs actions at the start of batches, and waits `pause` seconds in each batch."""

    def __init__(self, pause: float, **actions: Callable[[], object]) -> None:
        self.pause = pause
        self.actions = {int(batch.removeprefix("at_")): action for batch, action in actions.items()}

    def batch_start(self, state: State, logger: Logger) -> None:
        time.sleep(self.pause)
        self.actions.get(state.timestamp.batch, lambda: None)()


def make_trainer(run_dir: Path, batches: int, *loggers: Any, callbacks: Any = ()) -> Trainer:
    samples = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(100)]
    arguments = {"train_dataloader": samples, "max_duration": f"{batches}ba", "run_dir": run_dir}
    return tiny_trainer(*callbacks, loggers=loggers, **arguments)


@pytest.mark.slow
def test_a_server_gets_everything_from_a_run_and_from_its_resumption(
    store: Store, run_app: Any, tmp_path: Path
) -> None:
    env = {"MLFLOW_TRACKING_URI": store.server.uri, "MLFLOW_EXPERIMENT_NAME": store.experiment}
    finished = run_app(*TINY, "trainer.max_duration=2ep", env=env)
    [folder] = run_folders(tmp_path)
    [(run_id,)] = store.query("run_uuid", "runs")
    assert f"{store.server.uri}/#/experiments/" in finished.stdout and run_id in finished.stdout
    assert finished.stderr.count("MLflow") <= finished.stderr.count("saving to MLflow")
    uri = f"callbacks.mlflow_logger.tracking_uri={store.server.uri}"
    run_app("resume", str(folder), "trainer.max_duration=4ep", uri, f"experiment_name={store.experiment}")
    assert store.statuses() == ["FINISHED"]
    assert store.points() == logged(folder) and store.points()["loss/train/total", 12] == 1
    assert {"record/config.yaml", "plots/learning_curves.png"} <= {*store.artifacts()}
    assert ("optimizer.lr", "0.1") in store.query("key, value", "params")
    assert not list((tmp_path / "outputs" / ".mlflow_unsent").iterdir())
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


@pytest.mark.slow
def test_a_password_in_the_uri_is_neither_printed_nor_saved(store: Store, run_app: Any, tmp_path: Path) -> None:
    with Proxy(store.server, "failing") as proxy:
        env = {"MLFLOW_TRACKING_URI": proxy.uri.replace("://", "://me:secret@"), "MLFLOW_EXPERIMENT_NAME": "p"}
        failed = run_app(*TINY, "trainer.max_duration=1ep", env=env)
        proxy.mode = "up"
        synced = run_app("sync", env=env)
    assert "WARNING: MLflow: " in failed.stderr and ": everything is in MLflow" in synced.stdout
    words = [word for process in (failed, synced) for word in (process.stdout + process.stderr).split()]
    assert not [word for word in words if "secret" in word]
    [folder] = run_folders(tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path.name for path in files if b"secret" in path.read_bytes()] == []


@pytest.mark.slow
def test_values_arrive_if_files_cannot_be_stored_and_files_arrive_later(
    store: Store, run_app: Any, tmp_path: Path
) -> None:
    with Proxy(store.server, "no files") as proxy:
        env = {"MLFLOW_TRACKING_URI": proxy.uri, "MLFLOW_EXPERIMENT_NAME": store.experiment}
        finished = run_app(*TINY, "trainer.max_duration=4ep", env=env)
        [folder] = run_folders(tmp_path)
        assert "WARNING: MLflow: files: " in finished.stderr
        assert store.points() == logged(folder) and store.statuses() == ["FINISHED"]
        proxy.mode = "up"
        assert ": everything is in MLflow" in run_app("sync", env=env).stdout
    assert {"record/config.yaml", "plots/learning_curves.png"} <= {*store.artifacts()}
    assert store.points() == logged(folder)
    assert not list((tmp_path / "outputs" / ".mlflow_unsent").iterdir())


@pytest.mark.slow
def test_a_finished_run_waits_for_the_writer_of_an_earlier_session(store: Store, tmp_path: Path) -> None:
    lock = tmp_path / "r" / "mlflow" / "writer.lock"
    lock.parent.mkdir(parents=True)
    held = lock_file(lock)  # as if by the writer of a session just killed
    assert held is not None
    logger = MLflowLogger(store.server.uri, store.experiment, close_timeout=PATIENCE)
    with make_trainer(tmp_path / "r", 3, logger) as trainer:
        trainer.fit()
        threading.Timer(6.0, held.close).start()  # longer than a failing writer keeps trying
    assert store.statuses() == ["FINISHED"]


@pytest.mark.slow
def test_a_run_deleted_in_mlflow_during_training_loses_nothing(
    store: Store, run_app: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def delete() -> None:
        wait_until(lambda: store.points())
        (run_id,) = store.query("run_uuid", "runs")[0]
        sql = "update runs set lifecycle_stage = 'deleted' where run_uuid = ?"
        stores.change(store.server.folder / "mlflow.db", sql, run_id)

    logger = MLflowLogger(store.server.uri, store.experiment, close_timeout=15)
    with make_trainer(tmp_path / "r", 60, logger, callbacks=[Script(0.0, at_20=delete)]) as trainer:
        trainer.fit()
    assert "is deleted there; restore it in the UI" in caplog.text and "left out" not in caplog.text
    sent = store.points()
    assert 0 < sum(sent.values()) < sum(logged(tmp_path / "r").values())
    assert ": everything is in MLflow" in run_app("sync", "r").stdout
    assert store.points() == logged(tmp_path / "r") and store.statuses() == ["FINISHED"]


@pytest.mark.slow
def test_a_slow_server_does_not_slow_training_and_gets_everything(store: Store, tmp_path: Path) -> None:
    batches = 2000

    def seconds(*loggers: Any) -> float:
        with make_trainer(tmp_path / "run", batches, *loggers) as trainer:
            started = time.monotonic()
            trainer.fit()
            return time.monotonic() - started

    shared_writer()
    with Proxy(store.server, "slow") as proxy:
        alone = seconds(InMemoryLogger())
        with_server = seconds(MLflowLogger(proxy.uri, store.experiment))  # closing waits until everything is sent
        assert proxy.calls["slow"] > 5
    assert with_server < 3 * alone + 0.5, f"{batches / alone:.0f} batches/s alone, {batches / with_server:.0f} with it"
    assert store.statuses() == ["FINISHED"]
    assert store.points() == logged(tmp_path / "run") and store.points()["loss/train/total", batches] == 1


@pytest.mark.slow
def test_a_temporarily_unreachable_server_gets_everything_once(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "notes.txt").write_text("some notes")
    shared_writer()
    with Proxy(store.server, "cut") as proxy:

        def switch(mode: str, calls: int, cut: str = "") -> None:
            """Log something of each kind, wait for a number of calls to the server, and change the proxy's mode."""
            trainer.logger.log_images(np.zeros((2, 8, 8, 1), np.uint8), "images", captions=["one", "two"])
            trainer.logger.log_artifact(tmp_path / "notes.txt")
            trainer.logger.log_table(["a"], [[1]], f"table {trainer.state.timestamp.batch}")
            wait_until(lambda: proxy.calls[proxy.mode] >= calls and cut in "".join(proxy.cut))
            proxy.mode = mode
            proxy.cut.clear()

        script = Script(0.005, at_20=lambda: switch("up", 6, cut="runs/create"), at_120=lambda: switch("down", 12))
        script.actions |= {220: lambda: switch("cut", 2), 320: lambda: switch("up", 18)}
        mlflow = MLflowLogger(proxy.uri, store.experiment, system_metrics_interval=0.2)
        with make_trainer(tmp_path / "run", 400, mlflow, callbacks=[script]) as trainer:
            trainer.fit()
    assert store.statuses() == ["FINISHED"]
    assert store.points() == logged(tmp_path / "run") and len(store.points()) > 400
    images = Counter(name.rsplit("+", 1)[0] for name in store.artifacts() if name.endswith(".png"))
    assert len(images) == 8 and {*images.values()} == {1}
    assert "notes.txt" in store.artifacts() and "tables/table 220.json" in store.artifacts()
    cpu_steps = [step for (key, step) in store.points("key = 'system/cpu_utilization_percentage'").elements()]
    assert sorted(cpu_steps) == [*range(len(cpu_steps))] and len(cpu_steps) > 20
    [warning] = caplog.records
    assert warning.message.startswith(f"MLflow: {proxy.uri} cannot be reached (")


@pytest.mark.slow
def test_a_server_started_after_two_runs_gets_everything_from_both(
    store: Store, run_app: Any, tmp_path: Path, free_port: int
) -> None:
    env = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{free_port}", "MLFLOW_EXPERIMENT_NAME": store.experiment}
    for _ in range(2):
        started = time.monotonic()
        finished = run_app(*TINY, "trainer.max_duration=2ep", env=env)
        assert time.monotonic() - started < 40
        lines = [line for line in finished.stderr.splitlines() if not line.startswith("saving to MLflow")]
        assert len(lines) == 1 and "cannot be reached (Connection refused)" in lines[0], finished.stderr
    first, second = run_folders(tmp_path)
    with Proxy(store.server, port=free_port):
        for _ in range(2):  # the second finds nothing to do
            run_app("sync", str(first), env=env)
        assert store.statuses() == ["FINISHED"] and store.points() == logged(first)
        run_app(*TINY, "trainer.max_duration=1ep", env=env)
        wait_until(lambda: not list((tmp_path / "outputs" / ".mlflow_unsent").iterdir()))
    assert store.statuses() == ["FINISHED"] * 3
    assert store.points() == logged(first) + logged(second) + logged(run_folders(tmp_path)[-1])


@pytest.mark.slow
def test_two_runs_that_start_together_create_one_store(tmp_path: Path) -> None:
    arguments = ("trainer.max_duration=5ep", f"callbacks.mlflow_logger.close_timeout={PATIENCE}")
    runs = [start_app(tmp_path, *arguments, env={MAKE_STORES: "1"}) for _ in range(2)]
    assert [run.wait(PATIENCE) for run in runs] == [0, 0]
    assert sqlite_statuses(tmp_path) == ["FINISHED", "FINISHED"]


def sqlite_statuses(folder: Path) -> list[str]:
    return sorted(status for (status,) in stores.query(folder / "outputs" / "mlflow.db", "select status from runs"))


@contextlib.contextmanager
def killing_leftovers(*folders: Path) -> Iterator[Callable[[], list[psutil.Process]]]:
    """Yield a function that lists the processes running in these folders, and kill those that are left at the end."""

    def alive() -> list[psutil.Process]:
        return [process for folder in folders for process in processes_in(folder)]

    try:
        yield alive
    finally:
        for process in alive():
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "names"),
    [
        (signal.SIGKILL, ("sqlite", "slow", "silent", "dead")),
        (signal.SIGTERM, ("sqlite", "silent")),
        (signal.SIGINT, ("sqlite", "slow", "dead")),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGINT"],
)
def test_no_process_is_left_after_a_signal_ends_the_trainer(
    store: Store, tmp_path: Path, free_port: int, number: signal.Signals, names: tuple[str, ...]
) -> None:
    folders = [tmp_path / name for name in names]
    with (
        Proxy(store.server, "slow") as slow,
        Proxy(store.server, "silent") as silent,
        killing_leftovers(*folders) as alive,
    ):
        uris = {"sqlite": "", "slow": slow.uri, "silent": silent.uri, "dead": f"http://127.0.0.1:{free_port}"}
        trainers = []
        for name in names:
            (tmp_path / name).mkdir()
            env = {"MLFLOW_EXPERIMENT_NAME": store.experiment, "MLFLOW_TRACKING_URI": uris[name]}
            trainers.append(start_app(tmp_path / name, "trainer.max_duration=100000ep", env=env))
        wait_until(lambda: all(run_folders(tmp_path / name) for name in names))
        wait_until(
            lambda: (tmp_path / "sqlite/outputs/mlflow.db").exists() and sqlite_statuses(tmp_path / "sqlite"), 60
        )
        wait_until(lambda: len(alive()) == 2 * len(names))  # each trainer and its writer, once git has ended
        started = time.monotonic()
        for trainer in trainers:
            trainer.send_signal(number)
        wait_until(lambda: all(trainer.poll() is not None for trainer in trainers))
        wait_until(lambda: not alive(), 60 - (time.monotonic() - started))  # no writer retries for hours
    exits = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
    assert [trainer.returncode for trainer in trainers] == [exits[number]] * len(names)
    if sqlite_statuses(tmp_path / "sqlite") == ["RUNNING"]:  # the machine was too busy for the writer to finish in time
        (run_dir,) = run_folders(tmp_path / "sqlite")
        run_python(["-m", "runner", "sync", str(run_dir)], cwd=tmp_path / "sqlite", check=True)
    assert sqlite_statuses(tmp_path / "sqlite") == ["FAILED" if number is signal.SIGKILL else "KILLED"]


@pytest.mark.slow
def test_a_run_starts_after_the_creation_of_its_store_was_interrupted(tmp_path: Path, run_app: Any) -> None:
    with killing_leftovers(tmp_path):
        trainer = start_app(tmp_path, "trainer.max_duration=1000ep", env={MAKE_STORES: "1"})
        wait_until(lambda: any(stores.count_tables(path) > 10 for path in tmp_path.glob("outputs/*mlflow.db*")))
    assert trainer.wait(PATIENCE) == -signal.SIGKILL
    run_app(*TINY, "trainer.max_duration=1ep")
    wait_until(lambda: sqlite_statuses(tmp_path) == ["FAILED", "FINISHED"])
