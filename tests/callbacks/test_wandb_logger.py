from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from logged_runs import make_trainer
from PIL import Image
from python_process import PATIENCE

from runner import LoggerDestination
from runner.callbacks import CheckpointSaver, InMemoryLogger, WandBLogger
from runner.libraries.extras import how_to_install

installed = importlib.util.find_spec("wandb") is not None
pytestmark = pytest.mark.skipif(not installed, reason="needs the package wandb")


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path_factory.mktemp("wandb"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, folder)


@pytest.fixture(scope="module", autouse=True)
def stop_the_service() -> Iterator[None]:
    yield
    if installed:
        import wandb

        wandb.teardown()


def records(folder: Path) -> list[Any]:
    """Wait until wandb has written the end of a run to its file, and return the run's records."""
    (path,) = folder.glob("run-*.wandb")
    deadline = time.monotonic() + PATIENCE
    while not (entries := [*parse(path.read_bytes())]) or not any(record.HasField("exit") for record in entries):
        assert time.monotonic() < deadline, "wandb has not written the end of the run"
        time.sleep(0.02)
    return entries


def parse(content: bytes) -> Iterator[Any]:
    """Yield the records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    position, parts = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # no space for a header in this block
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4) and position <= len(content):  # a whole record, or its last part
            yield Record.FromString(parts)
            parts = b""


def folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def read(folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return wandb's record of a run, and the rows of its history."""
    entries = records(folder)
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in entries
        if record.HasField("history")
    ]
    return next(record.run for record in entries if record.HasField("run")), rows


def series(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["batch"], row[key]) for row in rows if key in row]


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config of a run, merged from all its updates."""
    merged: dict[str, Any] = {}
    for record in records(folder):
        update = record.run.config if record.HasField("run") else record.config
        for item in update.update:
            merged["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return merged


@pytest.mark.slow
def test_wandb_records_what_was_logged(tmp_path: Path):
    hooks = sys.exit, sys.excepthook
    memory = InMemoryLogger()
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4, 1)
    (tmp_path / "file.txt").write_text("content")
    wandb = WandBLogger("ours", group="all", tags=["one", "two"])
    config = {"lr": 0.1, "store": "postgresql://me:secret@host/db", "deep": {"er": [1, "http://me:secret@host"]}}
    with make_trainer(tmp_path / "run", wandb, memory, config=config, run_name="mine") as trainer:
        trainer.logger.log_hyperparameters({"before": "fit"})
        trainer.fit()
        trainer.logger.log_metrics({"late": 1.5}, step=2)
        trainer.logger.log_table(["x", "y"], [[1, "a"], ["b", None]], "table")
        trainer.logger.log_images(images, "Images/Train", captions=["one", "two"])
        trainer.logger.log_artifact(tmp_path / "file.txt", "texts")
        trainer.logger.log_tags({"commit": "abc"})
    assert (sys.exit, sys.excepthook) == hooks
    (folder,) = folders(tmp_path / "run")
    run, rows = read(folder)
    assert (run.run_id, run.project, run.display_name, run.run_group) == (wandb.run_id, "ours", "mine", "all")
    assert [*run.tags] == ["one", "two"]
    for key in memory.data:
        assert series(rows, key) == [*zip(*memory.get_timeseries(key), strict=True)], key
    assert series(rows, "late") == [(2, 1.5)]
    assert (folder / "files" / "texts" / "file.txt").read_text() == "content"
    (table_row,) = (row for row in rows if "table/path" in row)
    table = json.loads((folder / "files" / table_row["table/path"]).read_text())
    assert (table["columns"], table["data"]) == (["x", "y"], [[1, "a"], ["b", None]])
    (image_row,) = (row for row in rows if "Images/Train/captions" in row)
    assert (image_row["Images/Train/captions"], image_row["batch"]) == (["one", "two"], 6)
    for name, image in zip(image_row["Images/Train/filenames"], images, strict=True):
        assert (np.asarray(Image.open(folder / "files" / name).convert("L")) == image[..., 0]).all()
    config = config_of(folder)
    assert config["lr"] == 0.1 and config["before"] == "fit" and config["tags"] == {"commit": "abc"}
    assert config["store"] == "postgresql://***@host/db" and config["deep"] == {"er": [1, "http://***@host"]}


@pytest.mark.slow
def test_a_resumed_run_keeps_its_id_and_logs_each_step_once(tmp_path: Path):
    saver = CheckpointSaver(save_interval="2ba", keep=-1)
    first, second = WandBLogger(), WandBLogger()
    with make_trainer(tmp_path, first, duration="4ba", callbacks=[saver]) as trainer:
        trainer.fit()
    time.sleep(1.1)  # wandb names folders by the second in which they are made
    with make_trainer(tmp_path, second, resume_path=tmp_path / "checkpoints" / "latest") as trainer:
        trainer.fit()
    assert second.run_id == first.run_id
    sessions = [read(folder) for folder in folders(tmp_path)]
    assert {run.run_id for run, _ in sessions} == {first.run_id}
    steps = sorted(step for _, rows in sessions for step, _ in series(rows, "loss/train/total"))
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_two_runs_in_one_process_have_different_ids(tmp_path: Path):
    ids = []
    for name in ("a", "b"):
        with make_trainer(tmp_path / name, logger := WandBLogger()) as trainer:
            trainer.fit()
        (folder,) = folders(tmp_path / name)
        run, rows = read(folder)
        assert run.run_id == logger.run_id and len(series(rows, "loss/train/total")) == 6
        ids.append(run.run_id)
    assert ids[0] != ids[1]


@pytest.mark.slow
def test_a_failed_run_has_exit_code_1(tmp_path: Path):
    class Fails(LoggerDestination):
        def batch_end(self, state, logger):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(tmp_path, WandBLogger(), Fails()).fit()
    (folder,) = folders(tmp_path)
    assert [record.exit.exit_code for record in records(folder) if record.HasField("exit")] == [1]


def test_a_run_without_training_leaves_no_file(tmp_path: Path):
    with make_trainer(tmp_path, WandBLogger(), config={"lr": 0.1}) as trainer:
        trainer.logger.log_tags({"a": "b"})
    assert [*tmp_path.iterdir()] == []


def test_training_continues_without_an_api_key(tmp_path: Path, caplog):
    with make_trainer(tmp_path, WandBLogger(mode="online"), memory := InMemoryLogger()) as trainer:
        trainer.fit()
    assert len(memory.data["loss/train/total"]) == 6
    (message,) = caplog.messages
    assert message.startswith("wandb failed (there is no API key: run `wandb login`")


@pytest.mark.slow
def test_a_silent_server_delays_only_the_end_of_a_run(tmp_path: Path):
    # In a separate process, because wandb keeps retrying.
    source = """
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from test_wandb_logger import make_trainer
from runner.callbacks import WandBLogger
with make_trainer(Path("run"), WandBLogger(mode="online", close_timeout=5.0)) as trainer:
    began = time.perf_counter()
    trainer.fit()
    print(time.perf_counter() - began)
    began = time.perf_counter()
print(time.perf_counter() - began)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        env = os.environ | {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}
        here = Path(__file__).parent
        command = [sys.executable, "-c", source, str(here), str(here.parent / "support")]
        finished = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    fitting, closing = map(float, finished.stdout.split())
    assert fitting < 5 and 4.9 < closing < 20
    assert finished.stderr.count("wandb is not done after 5 s: training is not affected") == 1


def test_defaults_come_from_the_environment(monkeypatch):
    assert (WandBLogger().mode, WandBLogger().project) == ("offline", "runner")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert (WandBLogger().mode, WandBLogger().project) == ("online", "theirs")
    assert (WandBLogger("ours", mode="offline").mode, WandBLogger("ours").project) == ("offline", "ours")


@pytest.mark.parametrize(
    "arguments", [{"mode": "disabled"}, {"close_timeout": 0}, {"close_timeout": "1m"}, {"tags": "one"}], ids=str
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError) as caught:
        WandBLogger(**arguments)
    assert str(caught.value).startswith(f"{name}={value!r}: ")


def test_a_missing_wandb_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    message = f"WandBLogger needs wandb, not installed here: {how_to_install('wandb')}"
    with pytest.raises(ImportError, match=re.escape(message)):
        WandBLogger()
