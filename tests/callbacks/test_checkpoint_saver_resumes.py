"""A resumed run equals an uninterrupted one, and continues its checkpoints."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_runs import fit, make_trainer, saved, target

from runner import is_complete
from runner.callbacks import CheckpointSaver


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_run_that_did_not_stop(tmp_path, asynchronous: bool):
    whole = fit(tmp_path / "whole", CheckpointSaver("3ba", keep=-1, asynchronous=asynchronous))
    for name in ("ep0-ba3", "ep1-ba6"):
        checkpoint = tmp_path / "whole" / "checkpoints" / name
        second = fit(tmp_path / name, CheckpointSaver("3ba", keep=-1), resume_path=checkpoint)
        expected = whole.state.unwrapped_model.state_dict()
        torch.testing.assert_close(dict(second.state.unwrapped_model.state_dict()), dict(expected), rtol=0, atol=0)


def test_a_resumed_run_keeps_on_pruning_and_knows_the_best(tmp_path):
    with make_trainer(tmp_path, CheckpointSaver(keep=2, monitor="loss"), script=(1, 2)) as first:
        first.fit("2ep")
    assert saved(tmp_path) == {"ep1-ba4", "ep2-ba8"}
    saver = CheckpointSaver(keep=1, monitor="loss")
    fit(tmp_path, saver, script=(4, 3), resume_path=tmp_path)
    assert saved(tmp_path) == {"ep1-ba4", "ep4-ba16"}
    assert target(tmp_path, "best") == "ep1-ba4"
    assert saver.latest == tmp_path / "checkpoints" / "ep4-ba16"


def test_a_resumed_run_replaces_what_it_comes_past_again(tmp_path):
    fit(tmp_path, CheckpointSaver(keep=-1))
    before = (tmp_path / "checkpoints" / "ep3-ba12").stat().st_ino
    fit(tmp_path, CheckpointSaver(keep=-1), resume_path=tmp_path / "checkpoints" / "ep2-ba8")
    assert saved(tmp_path) == {"ep1-ba4", "ep2-ba8", "ep3-ba12", "ep4-ba16"}
    assert (tmp_path / "checkpoints" / "ep3-ba12").stat().st_ino != before


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the state of a checkpoint as somebody who passes it on might: it stays complete, with correct hashes."""
    saved = torch.load(checkpoint / "state.pt", weights_only=True)
    change(saved["callbacks"]["checkpoint_saver"])
    torch.save(saved, checkpoint / "state.pt")
    content = (checkpoint / "state.pt").read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.pt"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_has_nothing_removed_but_checkpoints_beside_it(tmp_path):
    with make_trainer(tmp_path / "run", CheckpointSaver(keep=-1)) as first:
        first.fit("2ep")
    checkpoints, precious = tmp_path / "run" / "checkpoints", tmp_path / "precious"
    shutil.copytree(checkpoints / "ep1-ba4", precious)  # another run's, manifest and all
    (checkpoints / "notes").mkdir()
    (checkpoints / "link").symlink_to(precious)
    names: list[Any] = [str(precious), "../../precious", "..", ".", "", "link", "notes", "latest", "a\0b", 7, None]

    def point_outside(saver: dict[str, Any]) -> None:
        saver["saved"] = [*names, *saver["saved"]]
        saver["best"] = [[-1.0, str(precious)], [0.0, "../../precious"]]

    rewrite(checkpoints / "ep2-ba8", point_outside)
    fit(tmp_path / "run", CheckpointSaver(keep=1, monitor="loss", keep_best=9), resume_path=checkpoints / "ep2-ba8")
    assert is_complete(precious) and (checkpoints / "notes").is_dir() and (checkpoints / "link").is_symlink()
    left = {path.name for path in checkpoints.iterdir()} - {"notes", "link", "latest", "best"}
    assert left == {"ep3-ba12", "ep4-ba16"}  # its own are pruned as ever
    assert target(tmp_path / "run", "best") in left
