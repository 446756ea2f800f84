"""`runner export`: the weights of a run in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import make_trainer
from torch import nn

from runner import ClassificationModel
from runner.callbacks import CheckpointSaver, LoadCheckpoint
from runner.checkpoints.hashing import digest
from runner.checkpoints.mirror import Mirror
from runner.checkpoints.writing import write_checkpoint
from runner.distributed.saved_tensor import IndexRange, ShardLayout
from runner.failures.errors import UnreadableCheckpoint
from runner.timing.time import Timestamp

PART = torch.arange(6.0).view(3, 2)
LAYOUT = ShardLayout((3, 2), ((IndexRange(0, 0, 3),), (IndexRange(0, 0, 2),)), True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a sharded checkpoint."""
    content = {"timestamp": Timestamp(batch=1).state_dict(), "model.pt": {"a": PART, "b": torch.ones(2), "tied": PART}}
    write_checkpoint({**content, "layouts": {id(PART): LAYOUT}}, tmp_path / "run/checkpoints/ba1")
    return tmp_path / "run"


@pytest.mark.parametrize(("name", "read"), [("a/model.pt", torch.load), ("model.safetensors", load_file)])
def test_shards_become_one_file(run_here: Any, run: Path, tmp_path: Path, name: str, read: Any):
    out = run_here("export", str(run), str(tmp_path / name), code=0).out
    assert f"3 weights of {run / 'checkpoints/ba1'}" in out
    assert digest(read(tmp_path / name)) == digest({"a": PART, "b": torch.ones(2), "tied": PART})
    assert not [*(tmp_path / name).parent.glob(".*partial*")]


class OwnModel(nn.Module):
    """A model of a user, whose weights are also in an attribute named `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)


@pytest.mark.parametrize(("name", "read"), [("model.pt", torch.load), ("model.safetensors", load_file)])
def test_exported_weights_fit_the_plain_network_and_start_a_run(run_here: Any, tmp_path: Path, name: str, read: Any):
    with make_trainer(tmp_path / "run", CheckpointSaver()) as trainer:
        trainer.fit()
    trained = dict(trainer.state.unwrapped_model.state_dict())
    run_here("export", str(tmp_path / "run"), str(tmp_path / name), code=0)
    network = nn.Linear(3, 2)
    network.load_state_dict(read(tmp_path / name))
    assert digest(dict(network.state_dict())) == digest({key.removeprefix("module."): trained[key] for key in trained})
    callback = LoadCheckpoint(tmp_path / name)
    for arguments in ({"load_path": tmp_path / name}, {"callbacks": [callback]}):
        with make_trainer(tmp_path / "new", max_duration="1ba", **arguments) as trainer:
            assert digest(dict(trainer.state.unwrapped_model.state_dict())) == digest(trained)
    with pytest.raises(ValueError, match="missing module.0.weight, module.0.bias; unexpected weig"):
        make_trainer(tmp_path / "new", model=ClassificationModel(nn.Sequential(network), 2), load_path=tmp_path / name)


def test_weight_names_of_a_users_model_are_unchanged(run_here: Any, tmp_path: Path):

    content = {"timestamp": Timestamp(batch=1).state_dict(), "model.pt": dict(OwnModel().state_dict())}
    config = {"model": {"_target_": "mine.OwnModel"}}
    write_checkpoint({**content, "config.json": config}, tmp_path / "run/checkpoints/ba1")
    run_here("export", str(tmp_path / "run"), str(tmp_path / "model.pt"), code=0)
    OwnModel().load_state_dict(torch.load(tmp_path / "model.pt"))


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_file_without_weights_is_refused(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"no weights")
    with pytest.raises(UnreadableCheckpoint, match=rf"{name} (was not written by|is not a safetensors file)"):
        make_trainer(tmp_path / "run", load_path=tmp_path / name)


def test_a_run_on_a_mirror_is_exported(run_here: Any, run: Path, tmp_path: Path):
    (run / "config.yaml").touch()
    Mirror(f"file://{tmp_path}/mirror/run").upload(run, "ba1", "checkpoints/ba1", [])
    err = run_here("export", f"file://{tmp_path}/mirror/run", str(tmp_path / "model.pt"), code=0).err
    assert "downloaded ba1" in err
    assert digest(torch.load(tmp_path / "model.pt")) == digest({"a": PART, "b": torch.ones(2), "tied": PART})


def test_what_cannot_be_exported_is_refused_in_one_sentence(run_here: Any, run: Path, tmp_path: Path):
    (tmp_path / "existing.pt").touch()
    for arguments, message in {
        (str(run), "existing.pt"): "error: FILE='existing.pt': this file exists; give another name, or remove it\n",
        (str(run), "model.bin"): "error: FILE='model.bin': must end in .pt or .safetensors; a folder ends in /\n",
        ("none", "model.pt"): "error: RUN='none': no such folder; give a run's folder, or a checkpoint's\n",
    }.items():
        assert message in run_here("export", *arguments, code=2).err
    err = run_here("export", "latest", code=2).err
    assert err.startswith("error: export: takes RUN FILE, not latest; write runner export RUN FILE, such as ")
