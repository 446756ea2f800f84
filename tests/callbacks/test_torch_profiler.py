from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from limited_files import limited_files
from torch import nn

from runner import Callback, ClassificationModel, save_checkpoint
from runner.callbacks import InMemoryLogger, TorchProfiler

make_trainer = partial(tiny_runs.make_trainer, max_duration="2ep")


class Calculates(Callback):
    """Runs a recognizable operation, and lists the batches after which the profiler is active or records."""

    def __init__(self, profiler: TorchProfiler):
        self.profiler = profiler
        self.active: list[int] = []
        self.recorded: list[int] = []

    def batch_end(self, state, logger):
        torch.erfinv(torch.zeros(3))
        if self.profiler._profile is not None:
            self.active.append(state.timestamp.batch)
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            self.recorded.append(state.timestamp.batch)


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "torch_profiler").glob("*"))


def read(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


NAMES = ("dataloader", "batch", "forward", "loss", "backward", "optimizer step", "batch_end: calculates")


def around(operation: dict[str, Any], events: list[dict[str, Any]]) -> set[str]:
    """Return the names of the ranges around an operation."""
    begin, end = operation["ts"], operation["ts"] + operation["dur"]
    ranges = (event for event in events if event["name"] in NAMES)
    return {event["name"] for event in ranges if event["ts"] <= begin and end <= event["ts"] + event["dur"] + 1e-3}


def test_each_cycle_writes_a_file_with_ranges_for_the_parts_of_a_batch(tmp_path: Path):
    memory = InMemoryLogger()
    profiler = TorchProfiler(skip_first=2, wait=1, warmup=1, active=3, repeat=2)
    with make_trainer(
        tmp_path, profiler, calculates := Calculates(profiler), loggers=[memory], grad_accum=2
    ) as trainer:
        trainer.fit()
    assert calculates.active == [4, 5, 6, 7, 9, 10, 11, 12]
    assert calculates.recorded == [5, 6, 7, 10, 11, 12]
    assert files(tmp_path) == ["rank0-ba10-ba12.json", "rank0-ba5-ba7.json"]
    assert [Path(path).name for path, _ in memory.artifacts] == ["rank0-ba5-ba7.json", "rank0-ba10-ba12.json"]
    assert {folder for _, folder in memory.artifacts} == {"torch_profiler"}
    for name in files(tmp_path):
        events = read(tmp_path / "torch_profiler" / name)
        counts = Counter(event["name"] for event in events if event["cat"] == "user_annotation")
        assert [counts[range_name] for range_name in ("batch", "optimizer step", "batch_end: calculates")] == [3] * 3
        assert counts["dataloader"] == 3 + ("ba10" in name)  # one more request finds the end of an epoch
        assert [counts[range_name] for range_name in ("forward", "loss", "backward")] == [6] * 3
        operations = [event for event in events if event["cat"] == "cpu_op"]
        for range_name, operation, count in (
            ("forward", "aten::linear", 6),
            ("loss", "aten::cross_entropy_loss", 6),
            ("batch_end: calculates", "aten::erfinv", 3),
        ):
            calls = [call for call in operations if call["name"] == operation]
            assert len(calls) == count
            for call in calls:
                assert around(call, events) == {range_name, "batch"}


def test_profiling_does_not_change_training_and_ends(tmp_path: Path):
    losses = []
    for profiler in ([], [TorchProfiler(skip_first=3, active=5)]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        memory = InMemoryLogger()
        model = ClassificationModel(module, 2)
        with make_trainer(tmp_path, *profiler, model=model, loggers=[memory]) as trainer:
            trainer.fit()
            losses.append(memory.get_timeseries("loss/train/total"))
    assert not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    assert losses[0] == losses[1]


def test_a_run_that_ends_early_writes_the_batches_recorded_so_far(tmp_path: Path, caplog):
    with make_trainer(tmp_path, TorchProfiler(skip_first=2), max_duration="5ba") as trainer:
        trainer.fit()
    assert files(tmp_path) == ["rank0-ba4-ba5.json"]
    with make_trainer(tmp_path / "short", TorchProfiler(skip_first=2), max_duration="3ba") as trainer:
        trainer.fit()
    assert files(tmp_path / "short") == []
    warning = "torch_profiler recorded nothing: it would have begun with batch 4, and training ended with batch 3"
    assert caplog.messages == [warning]


class Stops(Callback):
    def batch_end(self, state, logger):
        state.stop_training()


def test_a_resumed_run_that_stops_before_recording_gives_a_warning(tmp_path: Path, caplog):
    with make_trainer(tmp_path, max_duration="6ba") as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    with make_trainer(tmp_path, TorchProfiler(), Stops(), resume_path=tmp_path / "checkpoint") as trainer:
        trainer.fit()
    warning = "torch_profiler recorded nothing: it would have begun with batch 18, and training ended with batch 7"
    assert caplog.messages == [warning]


@pytest.mark.parametrize("skip_first", [0, 12])
def test_a_second_profiler_is_refused(tmp_path: Path, skip_first: int):
    message = r"callbacks=\['torch_profiler', 'torch_profiler_2'\]: must be a single TorchProfiler"
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, TorchProfiler(), TorchProfiler(skip_first=skip_first)).fit()


class RecordsToo(Callback):
    """Runs its own profiler from the end of the third batch to the end of the fifth."""

    def batch_end(self, state, logger):
        if state.timestamp.batch == 3:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()
        elif state.timestamp.batch == 5:
            self.profile.stop()


def test_a_cycle_is_left_out_if_another_profiler_records(tmp_path: Path, caplog):
    with make_trainer(tmp_path, TorchProfiler(skip_first=3, active=3, repeat=2), RecordsToo()) as trainer:
        trainer.fit()
    assert caplog.messages == ["torch_profiler leaves out batches 5 to 7: another profiler is active"]
    assert files(tmp_path) == ["rank0-ba9-ba11.json"]


class OwnStep(ClassificationModel):
    """Runs forward, loss and backward itself, without the event AFTER_FORWARD."""

    def training_step(self, state):
        loss = self.loss(self(state.batch), state.batch)
        (loss * state.loss_scale).backward()
        return loss.detach()

    def metrics(self, train):
        return {}


def test_a_range_without_a_closing_event_ends_before_the_next_range_or_with_its_batch(tmp_path: Path):
    profiler = TorchProfiler(skip_first=1)
    arguments = {"model": OwnStep(nn.Linear(3, 2), 2), "grad_accum": 2}
    with make_trainer(tmp_path, profiler, calculates := Calculates(profiler), **arguments) as trainer:
        trainer.fit()
    assert calculates.recorded == [3, 4, 5, 6]
    (name,) = files(tmp_path)
    events = read(tmp_path / "torch_profiler" / name)
    forward, batches = ([event for event in events if event["name"] == kind] for kind in ("forward", "batch"))
    assert (len(forward), len(batches)) == (8, 4)
    forward.sort(key=lambda event: event["ts"])
    for index, event in enumerate(forward):
        end = event["ts"] + event["dur"] - 1e-3
        assert any(outer["ts"] <= event["ts"] and end <= outer["ts"] + outer["dur"] for outer in batches)
        assert index == 7 or end <= forward[index + 1]["ts"]


class Fails(Callback):
    def after_forward(self, state, logger):
        if state.timestamp.batch == 5:
            raise RuntimeError("on purpose")


def test_a_failed_run_writes_the_batches_recorded_so_far(tmp_path: Path):
    trainer = make_trainer(tmp_path, TorchProfiler(skip_first=2), Fails())
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit()
    assert files(tmp_path) == ["rank0-ba4-ba5.json"]
    assert not torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def test_a_full_disk_gives_one_warning_and_leaves_no_file(tmp_path: Path, caplog):
    with make_trainer(tmp_path, profiler := TorchProfiler(active=2, repeat=2), Calculates(profiler)) as trainer:
        with limited_files(20_000):
            trainer.fit()
        assert trainer.state.timestamp.batch == 20
    (message,) = caplog.messages
    assert message.startswith("torch_profiler cannot write (torch could not finish ")
    assert message.endswith("rank0-ba12-ba13.json; is the disk full?): training continues without it")
    assert files(tmp_path) == []


def test_a_resumed_run_is_profiled_in_another_file(tmp_path: Path):
    with make_trainer(tmp_path, TorchProfiler(skip_first=1, active=2), max_duration="6ba") as trainer:
        trainer.fit()
        save_checkpoint(trainer.state, tmp_path / "checkpoint")
    profiler = TorchProfiler(skip_first=1, active=2)
    with make_trainer(tmp_path, profiler, resume_path=tmp_path / "checkpoint") as trainer:
        trainer.fit()
    assert files(tmp_path) == ["rank0-ba3-ba4.json", "rank0-ba9-ba10.json"]


def test_shapes_stacks_and_memory_are_recorded_on_request(tmp_path: Path):
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True, "with_flops": True}
    with make_trainer(tmp_path, TorchProfiler(skip_first=1, active=1, **options), max_duration="3ba") as trainer:
        trainer.fit()
    (name,) = files(tmp_path)
    content = json.loads((tmp_path / "torch_profiler" / name).read_text())
    linear = next(event for event in content["traceEvents"] if event["name"] == "aten::linear")
    assert linear["args"]["Input Dims"][0] == [2, 3]
    names = {event["name"] for event in content["traceEvents"]}
    assert "[memory]" in names
    assert any("runner/training/loop.py" in name for name in names)
    assert content["with_flops"] == 1


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_recorded(tmp_path: Path):
    with make_trainer(tmp_path, TorchProfiler(skip_first=1), device="cuda") as trainer:
        trainer.fit()
    (name,) = files(tmp_path)
    assert "kernel" in {event["cat"] for event in read(tmp_path / "torch_profiler" / name)}


@pytest.mark.parametrize("arguments", [{"skip_first": -1}, {"wait": 0.5}, {"warmup": 0}, {"active": 0}, {"repeat": 0}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TorchProfiler(**arguments)
