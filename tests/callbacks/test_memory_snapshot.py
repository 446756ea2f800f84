from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_trainer

from runner import Callback
from runner.callbacks import InMemoryLogger, MemorySnapshot


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "memory_snapshot").glob("*"))


def test_a_missing_gpu_gives_one_warning_and_training_continues(tmp_path: Path, caplog):
    with make_trainer(tmp_path, MemorySnapshot("1ba")) as trainer:
        trainer.fit()
        trainer.fit("1ep")
        assert trainer.state.timestamp.batch == 20
    assert caplog.messages == [
        "memory_snapshot does nothing: the model is on cpu, and torch records memory only on CUDA"
    ]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "arguments",
    [{"interval": 0}, {"max_entries": 0}, {"max_entries": 1.5}, {"keep": 0}, {"keep": -2}, {"keep": True}],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError) as caught:
        MemorySnapshot(**arguments)
    assert str(caught.value).startswith(f"{name}={value!r}: ")


@pytest.mark.gpu
def test_snapshots_have_allocations_with_their_stacks(tmp_path: Path):
    class Allocates(Callback):
        def batch_start(self, state, logger):
            self.held = torch.ones(3_000_000, device="cuda")

    memory = InMemoryLogger()
    callbacks = [MemorySnapshot("2ba", keep=2), Allocates()]
    with make_trainer(tmp_path, *callbacks, device="cuda", loggers=[memory]) as trainer:
        trainer.fit()
    assert files(tmp_path) == ["rank0-ba10.pickle", "rank0-ba8.pickle"]
    assert memory.artifacts == []
    snapshot = pickle.loads((tmp_path / "memory_snapshot" / "rank0-ba8.pickle").read_bytes())
    entries = [entry for trace in snapshot["device_traces"] for entry in trace if entry["size"] >= 12_000_000]
    names = {frame["name"] for entry in entries if entry["action"] == "alloc" for frame in entry["frames"]}
    assert "batch_start" in names
    # Nothing is recorded after the run.
    before = len(torch.cuda.memory._snapshot().get("device_traces", [[]])[0])
    torch.ones(5_000_000, device="cuda")
    assert len(torch.cuda.memory._snapshot().get("device_traces", [[]])[0]) == before


@pytest.mark.gpu
def test_all_snapshots_can_be_kept(tmp_path: Path):
    with make_trainer(tmp_path, MemorySnapshot("1ba", keep=-1), device="cuda", max_duration="4ba") as trainer:
        trainer.fit()
    assert files(tmp_path) == [f"rank0-ba{batch}.pickle" for batch in range(1, 5)]
