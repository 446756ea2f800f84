"""A resumed run is the run that did not stop, and goes on with its checkpoints."""

from __future__ import annotations

import pytest
import torch
from saver_runs import fit, make_trainer, saved, target

from callbacks import CheckpointSaver


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
