"""Checkpoints with unusable manifests, or with unusable content and a manifest that matches it."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from manifests import seal
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
    "saved_at of 400 digits": manifest(lambda facts: facts.update(saved_at=10**400)),
    "saved_at is NaN": manifest(lambda facts: facts.update(saved_at=float("nan"))),
    "braces": content("manifest.json", b'{"a":' * 100_000),
    "zeros": content("manifest.json", bytes(100)),
    "a large manifest": content("manifest.json", b" " * 5_000_000),
    "files of another type": manifest(lambda facts: facts.update(files=[3])),
    "a size of another type": manifest(lambda facts: facts["files"]["state.pt"].update(size="3")),
    "no timestamp": manifest(lambda facts: facts["timestamp"].clear()),
    "a negative batch": manifest(lambda facts: facts["timestamp"].update(batch=-1)),
    "more batches in the epoch": manifest(lambda facts: facts["timestamp"].update(batch_in_epoch=10**9)),
    "a manifest that is a folder": in_place("manifest.json", Path.mkdir),
    "a manifest that is a pipe": in_place("manifest.json", os.mkfifo),
    "weights that are a list": tensors("model.pt", lambda weights: [*weights.values()]),
    "weights without names": tensors("model.pt", lambda weights: dict(enumerate(weights.values()))),
    "weights that are a folder": in_place("model.pt", Path.mkdir),
    "weights that are a pipe": in_place("model.pt", os.mkfifo),
    "weights that are a link to themselves": in_place("model.pt", lambda path: path.symlink_to(path.name)),
    "deflated weights": deflate,
    "an empty state": content("state.pt", b""),
    "a state that is a list": tensors("state.pt", lambda state: [state]),
    "a state without optimizers": tensors(
        "state.pt", lambda state: {key: state[key] for key in state if key != "optimizers"}
    ),
    "a state with another timestamp": tensors("state.pt", lambda state: {**state, "timestamp": {"batch": "x"}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_single_warning(damage: str, run: Path, caplog: Any):
    newest = run / "checkpoints" / "ba10"
    DAMAGES[damage](newest)
    assert verify(newest) is not None
    assert find_checkpoint(run).name == "ba5"
    (message,) = [message for message in caplog.messages if "is not used" in message]
    assert str(newest) in message and len(message) < 400
    before = checkpoint_before(run, 11)
    assert before is not None and before.name == "ba5"
    saver = CheckpointSaver("5ba", filename="ba{batch}")
    with make_trainer(run, saver, resume_path=run, max_duration="2ep") as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == 20


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_link_to_itself_is_replaced(name: str, tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / name).symlink_to(name)
    with make_trainer(tmp_path / "run", CheckpointSaver("5ba", filename="ba{batch}")) as trainer:
        trainer.fit()
    assert find_checkpoint(folder / "latest").name == find_checkpoint(folder).name == "ba10"


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_folder_in_the_place_of_a_link_is_an_error_before_training(name: str, tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(FileExistsError, match=f"checkpoints/{name} is not a link to a checkpoint"):
        make_trainer(tmp_path / "run", CheckpointSaver("5ba"))


def resume_changed(run: Path, change: Callable[[dict[str, Any]], Any]) -> Trainer:
    """Change the state in the newest checkpoint, and return a Trainer that resumes from it."""

    def apply(state: dict[str, Any]) -> dict[str, Any]:
        change(state)
        return state

    tensors("state.pt", apply)(run / "checkpoints" / "ba10")
    return make_trainer(run, resume_path=run / "checkpoints" / "ba10", max_duration="2ep")


def test_a_state_that_does_not_fit_the_optimizer_is_an_error_with_its_checkpoint(run: Path):
    with pytest.raises(UnreadableCheckpoint, match=r"ba10.: its state of SGD cannot be used \(KeyError"):
        resume_changed(run, lambda state: state.update(optimizers=[{}]))


def test_a_batch_beyond_the_end_of_the_epoch_is_an_error_with_its_checkpoint(run: Path):
    def change(state: dict[str, Any]) -> None:
        state["timestamp"].update(batch=10**9, batch_in_epoch=10**9, sample=10**10, sample_in_epoch=10**10)

    with pytest.raises(UnreadableCheckpoint, match="ba10.: an epoch has no batch 1000000000"):
        resume_changed(run, change)


@pytest.mark.parametrize("name", ["", "latest", "best", "config.yaml", "a/b", "a\\b", ".a", "..%2fa", "a%20", "a\n", 3])
def test_reserved_and_unsafe_names_are_not_names_of_checkpoints(name: Any):
    assert not is_name(name)


def test_a_manifest_has_the_timestamp_and_the_files_of_its_checkpoint(run: Path):
    manifest = read_manifest(run / "checkpoints" / "ba5")
    assert manifest.timestamp.batch == 5 and {*manifest.files} == {"model.pt", "state.pt"} and manifest.save is None
