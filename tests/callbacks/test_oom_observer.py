from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_trainer

from runner import Callback
from runner.callbacks import InMemoryLogger, OOMObserver


def test_a_missing_gpu_gives_one_warning_and_training_continues(tmp_path: Path, caplog):
    with make_trainer(tmp_path, OOMObserver()) as trainer:
        trainer.fit()
        trainer.fit("1ep")
        assert trainer.state.timestamp.batch == 20
    assert caplog.messages == ["oom_observer does nothing: the model is on cpu, and torch records memory only on CUDA"]
    assert [*tmp_path.iterdir()] == []


def test_a_closed_run_is_not_kept_alive(tmp_path: Path):
    observer = OOMObserver()
    with make_trainer(tmp_path, observer) as trainer:
        trainer.fit()
    model = weakref.ref(trainer.state.unwrapped_model)
    del trainer
    gc.collect()
    assert model() is None
    observer.observe()  # torch may still call it
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("max_entries", [0, -1, 1.5, True, "many"])
def test_wrong_arguments_are_refused(max_entries: Any):
    with pytest.raises(ValueError) as caught:
        OOMObserver(max_entries)
    assert str(caught.value).startswith(f"max_entries={max_entries!r}: ")


@pytest.mark.gpu
def test_an_out_of_memory_error_writes_a_snapshot(tmp_path: Path):
    class RunsOutOfMemory(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch == 3:
                self.held = torch.ones(3_000_000, device="cuda")
                torch.empty(2**50, device="cuda", dtype=torch.uint8)

    memory = InMemoryLogger()
    trainer = make_trainer(tmp_path, OOMObserver(), RunsOutOfMemory(), device="cuda", loggers=[memory])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit()
    (path,) = (tmp_path / "oom_observer").iterdir()
    assert path.name == "rank0-ba3.pickle"
    assert memory.artifacts == [(str(path), "oom_observer")]
    snapshot = pickle.loads(path.read_bytes())
    entries = [entry for trace in snapshot["device_traces"] for entry in trace]
    names = {frame["name"] for entry in entries if entry["size"] >= 12_000_000 for frame in entry["frames"]}
    assert "batch_start" in names
    assert any(entry["action"] == "oom" for entry in entries)
    # The observer stays attached, but does nothing after its run.
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**50, device="cuda", dtype=torch.uint8)
    assert [*(tmp_path / "oom_observer").iterdir()] == [path]
