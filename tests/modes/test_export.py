"""`runner export`: the weights of a run in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runner.checkpoints.digest import digest
from runner.checkpoints.mirror import Mirror
from runner.checkpoints.writing import write_checkpoint
from runner.distributed.saved_tensor import Place, Run
from runner.time import Timestamp

PART = torch.arange(6.0).view(3, 2)
PLACE = Place((3, 2), ((Run(0, 0, 3),), (Run(0, 0, 2),)), True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a sharded checkpoint."""
    content = {"timestamp": Timestamp(batch=1).state_dict(), "model.pt": {"a": PART, "b": torch.ones(2), "tied": PART}}
    write_checkpoint(
        {**content, "places": {id(PART): PLACE}},
        tmp_path / "run/checkpoints/ba1",
    )
    return tmp_path / "run"


@pytest.mark.parametrize(("name", "read"), [("a/model.pt", torch.load), ("model.safetensors", load_file)])
def test_shards_become_one_file(run_here: Any, run: Path, tmp_path: Path, name: str, read: Any):
    out = run_here("export", str(run), str(tmp_path / name), code=0).out
    assert f"3 weights of {run / 'checkpoints/ba1'}" in out
    assert digest(read(tmp_path / name)) == digest({"a": PART, "b": torch.ones(2), "tied": PART})
    assert not [*(tmp_path / name).parent.glob(".*partial*")]


def test_a_run_on_a_mirror_is_exported(run_here: Any, run: Path, tmp_path: Path):
    (run / "config.yaml").touch()
    Mirror(f"file://{tmp_path}/mirror/run").upload(run, "ba1", "checkpoints/ba1", [])
    shown = run_here("export", f"file://{tmp_path}/mirror/run", str(tmp_path / "model.pt"), code=0)
    assert "downloaded ba1" in shown.err
    assert digest(torch.load(tmp_path / "model.pt")) == digest({"a": PART, "b": torch.ones(2), "tied": PART})


def test_what_cannot_be_exported_is_one_sentence(run_here: Any, run: Path, tmp_path: Path):
    (tmp_path / "there.pt").touch()
    for given, said in {
        (str(run), str(tmp_path / "there.pt")): "this file exists; give another name, or remove it",
        (str(run), "model.bin"): "the file must end in .pt or .safetensors",
        (str(tmp_path / "none"), "model.pt"): "no complete checkpoint there",
    }.items():
        assert said in run_here("export", *given, code=2).err
    assert "give a run, a checkpoint or an address, and a file" in run_here("mode=export", "export=latest", code=2).err
