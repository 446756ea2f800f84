"""Checkpoints whose author made a manifest that fits, with content that cannot be used."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_trainer

from runner import Trainer
from runner.callbacks import CheckpointSaver
from runner.checkpoints.files import find_checkpoint, verify
from runner.checkpoints.history import checkpoint_before
from runner.checkpoints.manifest import is_name, read_manifest
from runner.failures.errors import UnreadableCheckpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with checkpoints of batches 5 and 10."""
    with make_trainer(tmp_path / "run", CheckpointSaver("5ba", filename="ba{batch}")) as trainer:
        trainer.fit()
    return tmp_path / "run"


def seal(file: Path) -> None:
    """Make the manifest fit a file."""
    content = json.loads((file.parent / "manifest.json").read_text())
    data = file.read_bytes()
    content["files"][file.name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (file.parent / "manifest.json").write_text(json.dumps(content))


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(checkpoint: Path) -> None:
        content = json.loads((checkpoint / "manifest.json").read_text())
        change(content)
        (checkpoint / "manifest.json").write_text(json.dumps(content))

    return apply


def tensors(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(checkpoint: Path) -> None:
        torch.save(change(torch.load(checkpoint / name, weights_only=True)), checkpoint / name)
        seal(checkpoint / name)

    return apply


def content(name: str, data: bytes) -> Callable[[Path], None]:
    def apply(checkpoint: Path) -> None:
        (checkpoint / name).write_bytes(data)
        if name != "manifest.json":
            seal(checkpoint / name)

    return apply


def in_place(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def apply(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return apply


def deflate(checkpoint: Path) -> None:
    with zipfile.ZipFile(checkpoint / "model.pt") as source:
        entries = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(checkpoint / "model.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in entries.items():
            target.writestr(name, data)
    seal(checkpoint / "model.pt")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "saved_at of 400 digits": manifest(lambda one: one.update(saved_at=10**400)),
    "saved_at is NaN": manifest(lambda one: one.update(saved_at=float("nan"))),
    "braces": content("manifest.json", b'{"a":' * 100_000),
    "zeros": content("manifest.json", bytes(100)),
    "a large manifest": content("manifest.json", b" " * 5_000_000),
    "files of another type": manifest(lambda one: one.update(files=[3])),
    "a size of another type": manifest(lambda one: one["files"]["state.pt"].update(size="3")),
    "no time": manifest(lambda one: one["timestamp"].clear()),
    "a negative batch": manifest(lambda one: one["timestamp"].update(batch=-1)),
    "more batches in the epoch": manifest(lambda one: one["timestamp"].update(batch_in_epoch=10**9)),
    "a manifest that is a folder": in_place("manifest.json", Path.mkdir),
    "a manifest that is a pipe": in_place("manifest.json", os.mkfifo),
    "weights that are a list": tensors("model.pt", lambda one: [*one.values()]),
    "weights without names": tensors("model.pt", lambda one: dict(enumerate(one.values()))),
    "weights that are a folder": in_place("model.pt", Path.mkdir),
    "weights that are a pipe": in_place("model.pt", os.mkfifo),
    "weights that lead to themselves": in_place("model.pt", lambda one: one.symlink_to(one.name)),
    "deflated weights": deflate,
    "an empty state": content("state.pt", b""),
    "a state that is a list": tensors("state.pt", lambda one: [one]),
    "a state without optimizers": tensors(
        "state.pt", lambda one: {key: one[key] for key in one if key != "optimizers"}
    ),
    "a state of another time": tensors("state.pt", lambda one: {**one, "timestamp": {"batch": "x"}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_newest_checkpoint_is_skipped_with_one_line(damage: str, run: Path, caplog: Any):
    newest = run / "checkpoints" / "ba10"
    DAMAGES[damage](newest)
    assert verify(newest) is not None
    assert find_checkpoint(run).name == "ba5"
    (record,) = [one for one in caplog.records if "is not used" in one.getMessage()]
    assert str(newest) in record.getMessage() and len(record.getMessage()) < 400
    before = checkpoint_before(run, 11)
    assert before is not None and before.name == "ba5"
    with make_trainer(
        run, CheckpointSaver("5ba", filename="ba{batch}"), resume_path=run, max_duration="2ep"
    ) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 20


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_link_that_leads_to_itself_is_made_again(name: str, tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(name)
    with make_trainer(tmp_path / "run", CheckpointSaver("5ba", filename="ba{batch}")) as trainer:
        trainer.fit()
    assert find_checkpoint(folder / "latest").name == find_checkpoint(folder).name == "ba10"


@pytest.mark.parametrize("name", ["latest", "best"])
def test_what_stands_in_place_of_a_link_is_an_error_before_training(name: str, tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(FileExistsError, match=f"checkpoints/{name} is not a link to a checkpoint"):
        make_trainer(tmp_path / "run", CheckpointSaver("5ba"))


def changed_state(run: Path, change: Callable[[dict[str, Any]], Any]) -> Trainer:
    def apply(state: dict[str, Any]) -> dict[str, Any]:
        change(state)
        return state

    tensors("state.pt", apply)(run / "checkpoints" / "ba10")
    return make_trainer(run, resume_path=run / "checkpoints" / "ba10", max_duration="2ep")


def test_a_state_that_its_optimizer_cannot_use_is_one_message(run: Path):
    with pytest.raises(UnreadableCheckpoint, match=r"ba10.: its state of SGD cannot be used \(KeyError"):
        changed_state(run, lambda state: state.update(optimizers=[{}]))


def test_a_batch_that_an_epoch_does_not_have_is_one_message(run: Path):
    def change(state: dict[str, Any]) -> None:
        state["timestamp"].update(batch=10**9, batch_in_epoch=10**9, sample=10**10, sample_in_epoch=10**10)

    with pytest.raises(UnreadableCheckpoint, match="ba10.: an epoch has no batch 1000000000"):
        changed_state(run, change)


@pytest.mark.parametrize("name", ["", "latest", "best", "config.yaml", "a/b", "a\\b", ".a", "..%2fa", "a%20", "a\n", 3])
def test_a_checkpoint_cannot_have_a_name_that_means_something_else(name: Any):
    assert not is_name(name)


def test_the_manifest_of_a_run_is_read(run: Path):
    found = read_manifest(run / "checkpoints" / "ba5")
    assert found.timestamp.batch == 5 and {*found.files} == {"model.pt", "state.pt"} and found.save is None
