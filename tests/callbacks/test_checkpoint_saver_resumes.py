"""A resumed run equals an uninterrupted one, and continues its series of checkpoints."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saver_runs import assert_equal_weights, fit, make_trainer, saved, target

from runner import is_complete
from runner.callbacks import CheckpointSaver


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, asynchronous: bool):
    whole = fit(tmp_path / "whole", CheckpointSaver("3ba", keep=-1, asynchronous=asynchronous))
    for name in ("ep0-ba3", "ep1-ba6"):
        checkpoint = tmp_path / "whole" / "checkpoints" / name
        assert_equal_weights(fit(tmp_path / name, CheckpointSaver("3ba", keep=-1), resume_path=checkpoint), whole)


def test_a_resumed_run_prunes_earlier_checkpoints_and_remembers_the_best(tmp_path):
    with make_trainer(tmp_path, CheckpointSaver(keep=2, monitor="loss"), script=(1, 2)) as first:
        first.fit("2ep")
    assert saved(tmp_path) == {"ep1-ba4", "ep2-ba8"}
    saver = CheckpointSaver(keep=1, monitor="loss")
    fit(tmp_path, saver, script=(4, 3), resume_path=tmp_path)
    assert saved(tmp_path) == {"ep1-ba4", "ep4-ba16"}
    assert target(tmp_path, "best") == "ep1-ba4"
    assert saver.latest == tmp_path / "checkpoints" / "ep4-ba16"


def test_a_resumed_run_replaces_the_checkpoints_of_batches_that_it_trains_again(tmp_path):
    fit(tmp_path, CheckpointSaver(keep=-1))
    before = (tmp_path / "checkpoints" / "ep3-ba12").stat().st_ino
    fit(tmp_path, CheckpointSaver(keep=-1), resume_path=tmp_path / "checkpoints" / "ep2-ba8")
    assert saved(tmp_path) == {"ep1-ba4", "ep2-ba8", "ep3-ba12", "ep4-ba16"}
    assert (tmp_path / "checkpoints" / "ep3-ba12").stat().st_ino != before


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the saver's state in a checkpoint, and the hash in the manifest, so that the checkpoint stays valid."""
    saved = torch.load(checkpoint / "state.pt", weights_only=True)
    change(saved["callbacks"]["checkpoint_saver"])
    torch.save(saved, checkpoint / "state.pt")
    content = (checkpoint / "state.pt").read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.pt"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_manipulated_checkpoint_cannot_have_other_folders_removed(tmp_path):
    with make_trainer(tmp_path / "run", CheckpointSaver(keep=-1)) as first:
        first.fit("2ep")
    checkpoints, precious = tmp_path / "run" / "checkpoints", tmp_path / "precious"
    shutil.copytree(checkpoints / "ep1-ba4", precious)  # a complete checkpoint elsewhere
    (checkpoints / "notes").mkdir()
    (checkpoints / "link").symlink_to(precious)
    names: list[Any] = [str(precious), "../../precious", "..", ".", "", "link", "notes", "latest", "a\0b", 7, None]

    def point_outside(saver: dict[str, Any]) -> None:
        saver["saved"] = [*names, *saver["saved"]]
        saver["best"] = [[-1.0, str(precious)], [0.0, "../../precious"]]

    rewrite(checkpoints / "ep2-ba8", point_outside)
    fit(tmp_path / "run", CheckpointSaver(keep=1, monitor="loss", keep_best=9), resume_path=checkpoints / "ep2-ba8")
    assert is_complete(precious) and (checkpoints / "notes").is_dir() and (checkpoints / "link").is_symlink()
    remaining = {path.name for path in checkpoints.iterdir()} - {"notes", "link", "latest", "best"}
    assert remaining == {"ep3-ba12", "ep4-ba16"}  # the run's own checkpoints are pruned as usual
    assert target(tmp_path / "run", "best") in remaining
